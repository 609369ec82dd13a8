"""LLM requests and responses, and converters to and from the formats of LLM APIs (*wire formats*).

Depends only on `errors`. Used by every other folder.
"""
