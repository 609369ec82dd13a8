"""Control of a run under way, by files in its directory: orders to it, and its state.

Imports records and filesystem; imported by sweeps, running, ctl, view and cli.
"""
