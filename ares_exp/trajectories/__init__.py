"""Trajectories: recording, storing and loading what happened."""
