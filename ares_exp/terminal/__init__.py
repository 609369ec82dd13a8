"""Text on a terminal: tables, subcommands, and errors of the commands beside `python -m ares_exp`.

Imports nothing of ours; everything may import it.
"""
