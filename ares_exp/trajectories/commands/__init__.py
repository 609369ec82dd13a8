"""The command line: `python -m ares_exp.trajectories`."""
