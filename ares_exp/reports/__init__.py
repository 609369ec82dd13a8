"""Reports of runs: the summary that a run prints, the data of a report, and the HTML page that shows this data.

Depends on `trajectories`, `snapshots` and `records`. Used by `trackers`, `runs` and `commands`.
"""
