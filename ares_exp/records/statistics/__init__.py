"""Statistics of runs: means and pass rates with intervals, variation, and tests of differences.

Imports records alone; imported by trackers, reporting, sweeps and running.
"""
