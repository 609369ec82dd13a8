"""The files of a run directory: rows, totals, logs and control commands. Secrets are masked before they are written.

Depends on `errors` and `llms`. Used by all folders that read or write run directories.
"""
