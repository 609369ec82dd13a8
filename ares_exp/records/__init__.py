"""The files of a run directory: rows, totals, logs and control commands. Secrets are masked before they are written.

Imports errors and llms. All packages that use run directories import it.
"""
