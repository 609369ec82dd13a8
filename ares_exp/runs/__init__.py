"""The code that executes a run: it plans, schedules, retries and records episodes.

Depends on `environments`, `trackers` and the folders below them. Used by `wrappers`, `training` and `commands`.
"""
