"""Trajectory files: their layouts, and how they are written and read."""
