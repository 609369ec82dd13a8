"""The files of a run directory: rows, totals, logs and control commands. Secrets are masked before they are written.

This package imports errors and llms. All packages that use run directories import it.
"""
