"""Snapshots: saved episodes that can be restored, forked, replayed and branched.

Imports containers, trajectories and the environment contract. Environments and runs import it.
"""
