"""Commands of `ares-exp`, with one module per command.

Imports every other folder. Only `ares_exp.__main__` imports it.
"""
