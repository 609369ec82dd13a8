"""The commands of `ares-exp agents`, each a module."""
