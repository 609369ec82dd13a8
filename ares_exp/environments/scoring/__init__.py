"""Scorers: rewards of finished episodes from functions and judges, in addition to the verifier's."""
