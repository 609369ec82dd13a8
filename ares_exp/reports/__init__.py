"""Reports of runs for people: the table after a run, the payload of the pages, and the HTML page that shows it.

Imports trajectories, snapshots and records. Trackers, runs and commands import it.
"""
