"""Where the environments of a run live: in its own process, or in hosts on the nodes of a cluster.

May import everything up to `scoring`; imported by `running`, and by whoever plays episodes. `ray_executor` alone
imports Ray, when it connects.
"""
