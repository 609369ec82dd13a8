"""The endpoint that third-party agents ask instead of an LLM provider: wires, conversations, retries.

An unmodified agent speaks HTTP to a provider. Here its requests become `LLMRequest`s of an `LLMClient`, and the
responses go back in its own wire format.
"""
