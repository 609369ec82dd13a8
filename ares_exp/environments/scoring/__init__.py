"""Scorers, which add rewards from functions and judges to the verifier's rewards of finished episodes."""
