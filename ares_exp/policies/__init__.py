"""Policies, which respond to the LLM requests of code agents, and the code that sends requests to policies.

Imports llms, records and trajectories. Rollout, environments, runs and testing import it.
"""
