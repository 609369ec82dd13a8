"""Containers that code agents work in: one contract, and the backends local, Docker (with Podman) and Daytona.

Imports filesystem and records; imported by everything that records or plays an episode, never by policies.
"""
