"""Containers that code agents work in: one contract, and the backends local, Docker (with Podman) and Daytona.

Imports records and config; imported by every folder that records or runs an episode, except policies.
"""
