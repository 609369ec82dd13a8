"""Code agents: bundled agents, which run outside of the container, and third-party agents, whose programs run in it.

Imports llms, containers and tasks. Environments, runs and testing import it.
"""
