"""Environments: task + container + code agent behind reset, step and close."""
