"""Runs: the planned episodes, scheduled with retries and budgets, from the command line and from Python.

Imports environments, trackers and the folders below them; imported by wrappers, training and commands.
"""
