"""Snapshots: saved episodes that can be restored, forked, replayed and branched.

This package imports containers, trajectories and the environment contract. Environments and runs import it.
"""
