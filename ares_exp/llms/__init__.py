"""LLM requests and responses, and their wire formats.

Imports only errors; imported by every other folder.
"""
