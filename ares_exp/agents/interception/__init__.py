"""The HTTP endpoint that replaces the LLM provider of third-party agents: wire formats, conversations, retries.

An unmodified agent sends HTTP requests to a provider. The endpoint converts them to `LLMRequest`s for an `LLMClient`,
and returns the responses in the agent's wire format.
"""
