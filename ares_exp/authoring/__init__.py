"""The runs and verdicts of `ares-exp task check`, and the files of `ares-exp task new`.

Imports what plays a run's tasks and reads its rows; imported by the command line alone.
"""
