"""The HTTP endpoint that third-party agents use instead of their LLM provider.

An unmodified agent sends its HTTP requests to the endpoint. The endpoint converts them to `LLMRequest`s for an
`LLMClient`, and returns the responses in the format of the provider's API (wire format). It also detects retries and
the conversations of subagents.
"""
