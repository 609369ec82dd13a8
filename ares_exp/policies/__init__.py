"""Policies, which respond to the LLM requests of code agents, and the sending of requests to them.

Imports llms, records and trajectories; imported by rollout, environments, runs and testing.
"""
