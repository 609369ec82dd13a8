"""Trackers, which record the metrics of a run.

Imports reports, records and tasks. Runs and wrappers import it.
"""
