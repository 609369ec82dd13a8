"""Resuming, replaying and branching: what an earlier run recorded, and the episodes that are left to run."""
