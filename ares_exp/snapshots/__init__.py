"""Snapshots: an episode in the middle, on disk, to be restored, forked, replayed and branched."""
