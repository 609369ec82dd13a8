"""Agents of others: programs that run in the container and ask their LLM over HTTP, which this process answers."""
