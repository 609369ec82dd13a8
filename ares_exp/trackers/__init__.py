"""Trackers: where a run's metrics go.

Imports statistics, tasks and trajectories; imported by running and presets.
"""
