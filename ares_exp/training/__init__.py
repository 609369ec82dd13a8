"""Training: what a trainer asks for is played, and what was played becomes what it trains on.

Imports everything below the command line; imported by it through the option of the group `trainer`, and by scripts.
"""
