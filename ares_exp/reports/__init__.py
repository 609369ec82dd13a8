"""Pages: what a run and its episodes show to people, as one JSON payload, and the HTML page that draws it.

Imports trajectories, snapshots and statistics; imported by trackers, report and view.
"""
