"""Commands of `ares-exp`, with one module per command.

Depends on every other folder. Used only by `ares_exp.__main__`.
"""
