"""The episode journal: an agent's calls and their completions, in order, from which the agent can be run again.

Imports llms, containers and trajectories; imported by environments and testing.
"""
