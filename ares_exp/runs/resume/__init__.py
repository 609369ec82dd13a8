"""Resuming, replaying and branching of runs: the records of an earlier run, and the episodes that remain to be run."""
