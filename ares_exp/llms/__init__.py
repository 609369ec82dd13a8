"""LLM requests and responses, and their wire formats."""
