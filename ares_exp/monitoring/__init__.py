"""Monitoring: how the runner itself does while episodes are played, and which of them are stuck."""
