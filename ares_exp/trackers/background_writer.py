"""A background thread in which a tracker writes its files, so that the run never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ares_exp.records.terminal_text import one_line

_Inbox = queue.SimpleQueue[Callable[[], object] | None]

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Calls functions in a separate thread, in the order in which they were passed to `do`.

    If a function raises an exception, this is counted as a failure. The first failure is logged as a warning, and later
    ones at the debug level.

    Attributes:
        failures: Number of failures so far.
    """

    def __init__(self, what: str) -> None:
        """Creates a writer, but not its thread. Messages start with `what`, the name of the tracker."""
        self.failures = 0
        self._what = what
        self._inbox: _Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread with an empty queue."""
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(self._inbox,), name="tracker", daemon=True)
        self._thread.start()

    def do(self, act: Callable[[], object]) -> None:
        """Adds a function to the queue. Returns immediately. Does nothing before `start` and after `finish`."""
        if self._thread is not None:
            self._inbox.put(act)

    @property
    def waiting(self) -> int:
        """Number of functions in the queue."""
        return self._inbox.qsize()

    def finish(self, timeout_sec: float) -> None:
        """Waits until the functions in the queue have been called, for at most `timeout_sec`. Then ends the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(None)
        thread.join(timeout_sec)
        if thread.is_alive():
            self.report(f"did not finish within {timeout_sec:g} s; its files so far are on disk")

    def report(self, what: str) -> None:
        """Counts a failure, which `what` describes. Logs the first one as a warning, later ones for debugging."""
        self.failures += 1
        _logger.log(logging.WARNING if self.failures == 1 else logging.DEBUG, "%s %s", self._what, what)

    def _work(self, inbox: _Inbox) -> None:
        while (act := inbox.get()) is not None:
            try:
                act()
            except Exception as error:
                self.report(f"failed: {error_line(error)}")


def error_line(error: Exception) -> str:
    """Formats an error on one line: its type and the start of its message."""
    return one_line(f"{type(error).__name__}: {error}", 300)
