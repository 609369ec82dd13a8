"""Training on episodes: sequences of tokens as the engine sampled them, and what trainers make of them.

Stands above running and trajectories; imported by cli and commands. Libraries of trainers are imported where they are
used.
"""
