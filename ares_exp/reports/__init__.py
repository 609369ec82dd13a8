"""A run for people: the table after a run, the payload of the pages, and the HTML page that draws it.

Imports trajectories, snapshots and records; imported by trackers, runs and commands.
"""
