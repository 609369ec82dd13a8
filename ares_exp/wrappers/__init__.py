"""Gymnasium faces of an environment."""
