"""Presets: environments by name, as `ares_exp.make` builds them.

Imports running and what is below it; imported by wrappers and listing.
"""
