"""LLM requests and responses, and their wire formats.

This package imports only errors. Every other package imports it.
"""
