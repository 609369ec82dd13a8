"""Code agents: the scaffolds that talk to an LLM and work in a container.

Imports llms, containers and tasks; imported by environments and by whatever makes one.
"""
