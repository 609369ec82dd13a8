"""Scorers, which add rewards to the verifier's rewards. A scorer is a user function, or a model as a judge."""
