"""Code agents: bundled agents that send requests to an LLM and work in a container, and third-party agents.

Imports llms, containers and tasks. Environments, runs and testing import it.
"""
