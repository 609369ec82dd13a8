"""The command `python -m ares_exp.list`; its code is in `ares_exp.listing`."""
