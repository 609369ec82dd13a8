"""Training on episodes: sequences of tokens as the engine sampled them, and what trainers make of them.

Imports scripting and what is below; nothing imports it, as commands are named in cli and imported when they are called.
Libraries of trainers are imported where they are used.
"""
