"""Where the environments of a run live: in its own process, or in hosts on the nodes of a cluster.

Imports environments and what is below them, and scoring; imported by running. `ray_executor` alone
imports Ray, when it connects.
"""
