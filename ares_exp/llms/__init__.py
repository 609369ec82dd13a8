"""LLM requests and responses, and their wire formats.

Imports only errors. Every other package imports it.
"""
