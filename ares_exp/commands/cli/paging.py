"""Long output on a terminal, page by page: in `less`, or in what PAGER says."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ares_exp.records.terminal_text import make_console

if TYPE_CHECKING:
    from rich.console import Console

LESS = "-RFX"
"""Options of `less` where LESS says none: with colours, gone where all fits on the screen, which is left as it is."""


@contextlib.contextmanager
def paged_console(*, is_wanted: bool = True) -> Iterator[Console]:
    """Yields a console whose output goes through a pager, where stdout is a terminal and there is one; else stdout.

    The pager has ended when the body is left; that it is quit before the output ends is no error.

    Args:
        is_wanted: Whether to use a pager at all.
    """
    command = _pager() if is_wanted and sys.stdout.isatty() and sys.stdin.isatty() else None
    if command is None:
        yield make_console()
        return
    environment = {**os.environ, "LESS": os.environ.get("LESS", LESS)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, text=True, errors="backslashreplace"
    ) as pager:
        assert pager.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                yield make_console(pager.stdin)
        finally:
            with contextlib.suppress(BrokenPipeError):
                pager.stdin.close()
            while True:  # Ctrl-C is the pager's while it shows something
                with contextlib.suppress(KeyboardInterrupt):
                    pager.wait()
                    break


def _pager() -> list[str] | None:
    """Returns the command of the pager; `None` where there is none, or PAGER is empty."""
    try:
        words = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    return words if words and shutil.which(words[0]) is not None else None
