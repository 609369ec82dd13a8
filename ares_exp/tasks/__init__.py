"""Tasks (each with an instruction, a container and a verifier), with their formats, sources and verification.

Imports containers and trajectories. Agents, environments, runs and trackers import it.
"""
