"""Reports of runs: the summary that a run prints, the data of a report, and the HTML page that shows this data.

Imports trajectories, snapshots and records. Trackers, runs and commands import it.
"""
