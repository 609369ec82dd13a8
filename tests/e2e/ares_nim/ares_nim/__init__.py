"""The game of Nim: a package that knows of ares_exp, and that ares_exp knows nothing of."""
