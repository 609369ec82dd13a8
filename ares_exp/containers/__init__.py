"""Containers that code agents work in: one shared interface, and the backends local, Docker (or Podman) and Daytona.

Depends on the folders `config`, `llms` and `records`. Used by every folder that records or runs an episode, except
`policies`.
"""
