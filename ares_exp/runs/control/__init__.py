"""Control and monitoring of a run: order and status files in the run directory, and detection of stuck episodes."""
