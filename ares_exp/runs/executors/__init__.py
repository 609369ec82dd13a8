"""Where the environments of a run live: in its own process, or in hosts on the nodes of a cluster.

Only `ray_executor` imports Ray, when it connects.
"""
