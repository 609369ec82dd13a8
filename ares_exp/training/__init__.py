"""Training on episodes: what a trainer asks for is played, and becomes sequences of tokens as the engine sampled them.

Imports scripting and what is below; nothing imports it, as commands and options are named and imported when they are
used. Libraries of trainers are imported where they are used.
"""
