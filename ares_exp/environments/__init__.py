"""Environments, which combine a task, a container and a code agent behind reset, step and close.

Depends on `agents`, `tasks`, `snapshots` and the folders below them. Used by `runs`, `wrappers` and `testing`.
"""
