"""The execution of environments in the run's own process, or in hosts on the nodes of a cluster.

Only `ray_executor` imports Ray, when it connects.
"""
