"""Training on episodes: trainers, the driver that runs the episodes they ask for, and rows of sampled tokens.

Imports runs and the folders below it; imported by no other folder, because commands and options are imported by name
when they are used. Libraries of trainers are imported where they are used.
"""
