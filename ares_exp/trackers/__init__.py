"""Trackers, which record the metrics of a run, for example in a file or in Weights & Biases.

Imports reports, records and tasks. Runs and wrappers import it.
"""
