"""Sweeps, which run several jobs with one command: their plan, folders and report."""
