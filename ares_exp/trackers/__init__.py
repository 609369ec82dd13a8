"""Trackers: where a run's metrics go.

Imports reports, records and tasks; imported by runs and wrappers.
"""
