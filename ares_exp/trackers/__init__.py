"""Trackers: where a run's metrics go."""
