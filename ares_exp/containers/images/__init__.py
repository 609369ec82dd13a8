"""Dockerfiles without an engine: parsed into steps, which are applied in a running container."""
