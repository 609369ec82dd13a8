"""Policies: they answer the LLM requests of code agents.

Imports llms and trajectories; imported by resume, environments with models of their own, running and cli.
"""
