"""Environments, which combine a task, a container and a code agent behind reset, step and close.

Imports agents, tasks, snapshots and the packages below them. Runs, wrappers and testing import it.
"""
