"""Tasks: an instruction, a container, a verifier; their formats, sources and scores.

Imports containers and trajectories; imported by agents, environments, runs and trackers.
"""
