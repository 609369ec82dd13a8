"""Environments: task + container + code agent behind reset, step and close.

Imports agents, journal, tasks, snapshots and what is below them; imported by running, presets, wrappers and cli.
"""
