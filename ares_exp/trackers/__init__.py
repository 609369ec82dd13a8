"""Trackers, which record the metrics of a run, for example in a file or in Weights & Biases.

Depends on `reports`, `trajectories`, `records` and `tasks`. Used by `runs` and `wrappers`.
"""
