"""`python -m ares_exp.list`: what can be chosen, and where it comes from."""
