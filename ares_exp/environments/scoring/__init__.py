"""Scorers: rewards of finished episodes from functions and judges of your own, beside the verifier's.

Imports environments and what is below them; imported by running, presets and testing.
"""
