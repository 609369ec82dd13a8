"""Executors, which run environments in the run's own process or on the nodes of a Ray cluster.

Ray is an optional dependency. Only `ray_executor` imports it, when it connects to a cluster.
"""
