"""Runs: planning, scheduling, retrying and recording of episodes, from the command line or from Python.

Imports environments, trackers and the packages that they import. Wrappers, training and commands import it.
"""
