"""Control and monitoring of a running run: command files and status files in its directory, and detection of stalls."""
