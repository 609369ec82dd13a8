"""Code agents: scaffolds that ask an LLM and work in a container, and third-party agents.

Imports llms, containers and tasks; imported by environments, runs and testing.
"""
