"""Training on episodes: trainers, the driver that runs episodes for a trainer, and training rows of token ids.

Imports runs and the folders below it. No other folder imports it: commands and options that use it are imported by
name when they are used. The libraries of trainers are imported on first use.
"""
