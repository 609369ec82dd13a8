"""Exports of trajectories for trainers."""
