"""Collectors: storage of episodes during a run."""
