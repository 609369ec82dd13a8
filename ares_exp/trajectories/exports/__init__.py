"""Export formats of trajectories."""
