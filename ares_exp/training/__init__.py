"""Training on episodes: what a trainer asks for is played, and becomes sequences of tokens as the engine sampled them.

Stands above running and trajectories; imported by cli, scripting and commands. Libraries of trainers are imported where
they are used.
"""
