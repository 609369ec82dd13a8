"""Policies, which respond to the LLM requests of code agents, and how they are asked.

Imports llms, records and trajectories; imported by rollout, environments, runs and testing.
"""
