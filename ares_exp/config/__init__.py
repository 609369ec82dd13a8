"""Configuration with Hydra: the schema of the root config, options, plugins, and errors of composition.

Imports errors and records. Every folder that composes or reads a config imports it.
"""
