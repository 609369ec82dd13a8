"""Configuration with Hydra: the schema of the root config, options, plugins, and errors of composition.

Depends on `errors` and `records`. Used by every folder that composes or reads a config.
"""
