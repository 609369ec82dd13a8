"""How a policy is asked: answers checked where they enter, several at once where the policy allows that.

Imports environment, records and llms; imported by rollout, resume, running and testing.
"""
