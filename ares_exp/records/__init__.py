"""The files of a run directory: rows, totals, logs. Secrets are masked on the way to them.

Imports errors and llms; everything may import it.
"""
