"""How a policy is asked: its answers are checked where they enter.

Imports environment, records and llms; imported by rollout and resume.
"""
