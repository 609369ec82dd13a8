"""The commands of `python -m ares_exp.trackers`."""
