"""LLM requests and responses, and their wire formats.

Imports errors alone; everything may import it.
"""
