"""Sweeps: many jobs of one command, in this process or in others; what they add up to; how they stop and go on."""
