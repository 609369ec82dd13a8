"""Resuming, replaying and branching: the records of an earlier run, and the remaining episodes."""
