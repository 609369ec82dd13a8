"""Snapshots: an episode on disk, to be restored, forked, replayed and branched.

Imports filesystem and the environment contract; imported by environments, resume and running.
"""
