"""One run: the planned episodes played concurrently, with retries, budgets, progress and monitoring.

Imports environments, resume, trackers and what is below them; imported by presets and cli.
"""
