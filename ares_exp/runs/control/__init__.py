"""Control and monitoring of a run in progress.

Users send orders, such as `pause`, as files in the run directory. The run writes its state to a file there, and warns
about stuck episodes.
"""
