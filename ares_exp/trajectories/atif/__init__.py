"""The Agent Trajectory Interchange Format (ATIF)."""
