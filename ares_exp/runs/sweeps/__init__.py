"""Sweeps, in which one command runs several jobs with different configs: their plan, folders and report."""
