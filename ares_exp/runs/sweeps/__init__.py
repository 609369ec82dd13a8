"""Sweeps: many jobs of one command, their plan, their folders, their report.

Imports resume and statistics; imported by running and cli.
"""
