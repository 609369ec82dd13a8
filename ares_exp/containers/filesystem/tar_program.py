"""Command lines for the `tar` of a container whose archives `tar_entries` can read."""

from __future__ import annotations

GNU_CREATE = (
    "--create",
    "--null",
    "--no-recursion",
    "--format=posix",
    "--sparse",
    "--numeric-owner",
    "--xattrs",
    "--xattrs-include=*",
)
"""Arguments of GNU tar that keep all there is to know. What it reads is to be given with `--files-from`."""

READ_SOMETHING = (0, 1, 2)
"""Exit codes: it read all; all, but some changed meanwhile; some could not be read."""

YOUNG_SEC = 2.0
"""What changed so short a time ago may change again without a trace: it is read again."""
