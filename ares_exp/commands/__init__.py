"""Commands of `ares-exp`, one file each.

Imports every other folder; imported only by `ares_exp.__main__`.
"""
