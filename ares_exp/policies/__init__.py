"""Policies, which respond to the LLM requests of code agents, and the sending of requests to them.

Imports llms, records and trajectories. Rollout, environments, runs and testing import it.
"""
