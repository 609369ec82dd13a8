"""Monitoring of the runner's own health while episodes are played, and of stuck episodes."""
