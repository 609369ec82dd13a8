"""Exit codes of `ares-exp`. A sweep exits with the highest code of its jobs."""

COMPLETE = 0
"""Every planned attempt has a reward."""
INCOMPLETE = 1
"""An attempt has no reward, the reference solution of a task failed, or a job of a sweep failed."""
USAGE = 2
"""The command line or the config is invalid, or a preflight check failed."""
INTERRUPTED = 130
"""Ctrl-C, SIGTERM or a request to stop ended the command."""
