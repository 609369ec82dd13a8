"""Tasks (each with an instruction, a container and a verifier), with their formats, sources and verification.

Imports containers and trajectories; imported by agents, environments, runs and trackers.
"""
