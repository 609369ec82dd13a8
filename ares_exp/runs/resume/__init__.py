"""Resuming an earlier run: its answer log, its sessions, and the episodes that are still to be played.

Imports policies, trajectories and snapshots; imported by running, sweeps, reporting and cli.
"""
