"""Policies, which respond to the LLM requests of code agents, and the code that sends requests to policies.

Depends on `llms`, `records` and `trajectories`. Used by `rollout`, `environments`, `runs` and `testing`.
"""
