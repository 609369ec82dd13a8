"""What the W&B tracker records, and how: the service, rows, the table of episodes, artifacts, moved run directories."""
