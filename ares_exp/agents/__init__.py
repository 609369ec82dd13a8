"""Code agents: bundled agents, which run outside of the container, and third-party agents, whose programs run in it.

Depends on `llms`, `containers` and `tasks`. Used by `environments`, `runs` and `testing`.
"""
