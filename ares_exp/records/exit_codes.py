"""Exit codes of `ares-exp`; its worst job's is the command's."""

COMPLETE = 0
"""Every episode asked for has a reward."""
INCOMPLETE = 1
"""Some have none, a task's own solution failed, or a job of a sweep failed."""
USAGE = 2
"""The command line, the config or the preflight is at fault."""
INTERRUPTED = 130
"""Ctrl-C, SIGTERM or a request to stop."""
