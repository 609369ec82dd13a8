"""LLM requests and responses, and converters to and from the formats of LLM APIs (*wire formats*).

Imports only errors. Every other package imports it.
"""
