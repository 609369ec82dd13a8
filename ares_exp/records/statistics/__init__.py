"""Statistics of runs: means and pass rates with confidence intervals, variation, and tests of differences."""
