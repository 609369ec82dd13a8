"""The files of a run directory: rows, totals, logs and control commands. Secrets are masked before they are written.

Imports errors and llms. Every folder above imports it.
"""
