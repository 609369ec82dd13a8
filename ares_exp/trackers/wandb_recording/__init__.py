"""Parts of the W&B tracker: the service, the numbers, the table of episodes, artifacts, and the record for uploads."""
