"""Resuming, replaying and branching, which read the records of an earlier run and continue from them."""
