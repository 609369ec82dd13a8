"""Sweeps: many jobs of one command, their plan, their folders, their report."""
