"""Dockerfiles, as far as they are read here: split into instructions, turned into steps, done in a running box."""
