"""The progress display of a run: a bar and status lines on a terminal, and elsewhere a plain line every few seconds.

A separate thread draws the display. It therefore stays current while the event loop is busy, and a slow terminal never
delays an episode.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self, TextIO

from ares_exp.records.terminal_text import format_duration, format_number, one_line, separator, wrap
from ares_exp.runs.control.status import RunStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_REDRAW_SEC = 0.2
_INDENT = "  "
_BAR_COLUMNS = 20
_LEAST_COLUMNS = 8
"""Minimum width, in columns, of the bar and of the list of task names. They are omitted if there is less room."""
_MAX_LINES = 2
"""Maximum number of terminal lines for each status line below the bar. The rest of a longer line is cut off."""
_STOP_TIMEOUT_SEC = 2.0


class Progress:
    """Shows the state of a run during the block, such as `3/12 done · 4 running · reward 0.67 · ETA 12 s`."""

    def __init__(
        self,
        status: Callable[[], RunStatus],
        *,
        stream: TextIO | None = None,
        is_tty: bool | None = None,
        interval_sec: float = 5.0,
        is_kept: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stores the arguments. Entering the context starts the display.

        `status` returns the state of the run, and is called in the drawing thread. If `stream` is not a terminal
        (detected by default), a line is written every `interval_sec` seconds. If `is_kept` is set, the last state
        remains visible after the end.
        """
        self._status = status
        self._stream = stream if stream is not None else sys.stderr
        if is_tty is None:
            is_tty = self._stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}
        self._is_tty = is_tty
        self._interval_sec = interval_sec
        self._is_kept = is_kept
        self._clock = clock
        self._separator = separator(self._stream)
        self._started_at = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._started_at = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join(_STOP_TIMEOUT_SEC)

    def line(self, status: RunStatus) -> str:
        """Formats a state as one line. Omits unknown values."""
        elapsed, done = self._clock() - self._started_at, status.ended - status.cut_short
        parts = [f"{done}/{status.expected} done"] if status.expected or not status.done_before else []
        if status.done_before:
            parts.append(f"{status.done_before} done before")
        if status.cut_short:
            parts.append(f"{status.cut_short} interrupted")
        if status.running:
            parts.append(f"{status.running} running")
        if status.held is not None or status.outage:
            parts.append(f"paused ({status.outage.rstrip('.')})" if status.outage and not self._is_tty else "paused")
        if status.reward[0] is not None:
            parts.append(f"reward {format_number(status.reward[0])}")
        if 0 < done < status.expected and not status.cut_short and status.held is None and not status.outage:
            parts.append(f"ETA {format_duration(elapsed / done * (status.expected - done))}")
        else:
            parts.append(format_duration(elapsed))
        return self._separator.join(parts)

    def _draw(self) -> None:
        # A closed terminal or pipe must not end the run.
        with contextlib.suppress(OSError, ValueError):
            if self._is_tty:
                self._draw_bar()
            else:
                self._print_lines()

    def _print_lines(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(self._interval_sec)
            if stopped and not self._is_kept:
                return
            self._stream.write(self.line(self._status()) + "\n")
            self._stream.flush()

    def _draw_bar(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, force_terminal=True)
        live = Live(
            get_renderable=lambda: self._bar(console.width),
            console=console,
            auto_refresh=False,
            transient=not self._is_kept,
            # Output that is redirected to a file must still go to the file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        with live, _log_lines_above(console):
            # The cursor stays visible, so that a killed process cannot leave it hidden.
            console.show_cursor(True)
            while not self._stopped.wait(_REDRAW_SEC):
                live.refresh()

    def _bar(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status = self._status()
        line = self.line(status)
        cells: list[RenderableType] = [Text(line)]
        room = width - len(line) - 1
        if room >= _LEAST_COLUMNS:
            columns, done = min(room, _BAR_COLUMNS), status.ended - status.cut_short
            cells.insert(0, ProgressBar(max(status.expected, 1), completed=done, width=columns))
            room -= columns + 1
        if room >= _LEAST_COLUMNS:
            names = ", ".join(dict.fromkeys(one.task_name for one in status.episodes))
            cells.append(Text(one_line(names, room), style="dim", no_wrap=True, overflow="ellipsis"))
        grid = Table.grid(*[""] * len(cells), padding=(0, 1))
        grid.add_row(*cells)
        if self._stopped.is_set():
            return grid
        below = []
        for text in status.lines():
            style = "red" if text.startswith("error: ") else "dim"
            parts = wrap(_INDENT + one_line(text, _MAX_LINES * width), width, max_lines=_MAX_LINES)
            below += [Text(part, style, no_wrap=True, overflow="ellipsis") for part in parts]
        return Group(grid, *below)


@contextlib.contextmanager
def _log_lines_above(console: Console) -> Iterator[None]:
    """Makes log records for the terminal appear above the bar. Otherwise, they would overwrite the bar."""
    from rich.file_proxy import FileProxy

    handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
    streams = [(handler, handler.stream) for handler in handlers if handler.stream.isatty()]
    for handler, stream in streams:
        handler.setStream(FileProxy(console, stream))
    try:
        yield
    finally:
        for handler, stream in streams:
            handler.setStream(stream)
