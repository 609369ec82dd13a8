"""Text on a terminal: tables, and the frame of the commands.

Imports `errors` alone; everything above may import it.
"""
