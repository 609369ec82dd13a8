"""The endpoint that code agents of others ask instead of an LLM provider: wires, conversations, retries.

An unmodified agent speaks HTTP to a provider. Here its requests become `LLMRequest`s of an `LLMClient`, and the
responses go back in its own wire format.

Imports llms and the environment contract; imported by agents.
"""
