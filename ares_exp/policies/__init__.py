"""Policies: what answers a code agent's LLM requests."""
