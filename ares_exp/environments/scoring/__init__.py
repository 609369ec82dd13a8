"""Scorers, which add rewards to the verifier's rewards of finished episodes: user functions, or a model as a judge."""
