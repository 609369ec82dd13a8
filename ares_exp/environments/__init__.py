"""Environments, which combine a task, a container and a code agent behind reset, step and close.

Imports agents, tasks, snapshots and the folders below them; imported by runs, wrappers and testing.
"""
