"""Training on episodes: trainers, the driver that plays what they ask for, and rows of the tokens that were sampled.

Imports scripting and what is below; nothing imports it, as commands and options are named and imported when they are
used. Libraries of trainers are imported where they are used.
"""
