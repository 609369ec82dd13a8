"""The code that executes a run: it plans, schedules, retries and records episodes.

Imports environments, trackers and the packages that they import. Wrappers, training and commands import it.
"""
