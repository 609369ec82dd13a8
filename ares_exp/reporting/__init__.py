"""Reports on finished runs: the table after a run, comparisons of two, merged shards.

Imports resume, statistics and trajectories; imported by cli and commands.
"""
