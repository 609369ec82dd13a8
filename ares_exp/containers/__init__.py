"""Containers that code agents work in: one shared interface, and the backends local, Docker (or Podman) and Daytona.

Imports config, llms and records. Every folder that records or runs an episode imports it, except policies.
"""
