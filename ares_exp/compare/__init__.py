"""The command `python -m ares_exp.compare`; its code is in `ares_exp.reporting.compare`."""
