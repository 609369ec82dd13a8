"""Snapshots: saved episodes that can be restored, forked, replayed and branched.

Depends on `containers`, `trajectories` and `environment`. Used by `environments` and `runs`.
"""
