"""The functions for scripts and notebooks: runs and episodes played from Python.

Imports everything, the command line's run included; imported by user code through `ares_exp`.
"""
