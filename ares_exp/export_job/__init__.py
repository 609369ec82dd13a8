"""The command `python -m ares_exp.export_job`; its code is in `ares_exp.harbor_export`."""
