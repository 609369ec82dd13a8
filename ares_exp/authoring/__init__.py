"""`ares-exp new-task` and `ares-exp check-task`: a task to begin with, and whether the tests of tasks test.

Imports what plays a run's tasks and reads its rows; imported by the command line alone.
"""
