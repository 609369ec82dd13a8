"""`ares-exp list`: options, presets and tasks, and where each comes from.

Imports presets and config; imported by its command alone.
"""
