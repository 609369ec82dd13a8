"""Commands of `ares-exp`, one file each.

Imports every other folder. Only `ares_exp.__main__` imports it.
"""
