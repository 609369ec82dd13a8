"""Statistics of runs: means and pass rates with intervals, variation, and tests of differences."""
