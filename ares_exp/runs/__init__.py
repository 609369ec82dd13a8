"""Runs: planned episodes that are scheduled with retries and budgets, from the command line or from Python.

Imports environments, trackers and the packages that they import. Wrappers, training and commands import it.
"""
