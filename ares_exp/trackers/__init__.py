"""Trackers, which record the metrics of a run.

Imports reports, records and tasks; imported by runs and wrappers.
"""
