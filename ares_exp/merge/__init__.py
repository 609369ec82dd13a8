"""The command `python -m ares_exp.merge`; its code is in `ares_exp.reporting.merge`."""
