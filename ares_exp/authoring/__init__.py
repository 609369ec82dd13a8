"""The runs and verdicts of `ares-exp task check`, and the files of `ares-exp task new`.

Imports the environments and the rows of a run; imported only by the command.
"""
