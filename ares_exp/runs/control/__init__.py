"""Control and monitoring of a run: command files and status files in its directory, and detection of stalls."""
