"""Text on a terminal: tables, subcommands, and the frame of the commands.

Imports `errors` alone; everything above may import it.
"""
