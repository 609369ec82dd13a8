"""Statistics of runs: means and pass rates with intervals, what varies, and whether two runs differ."""
