"""The handler of `run.log`."""

from __future__ import annotations

import logging


class RunLogHandler(logging.FileHandler):
    """A file handler that never raises: `logging.FileHandler` does where the file cannot be opened (again).

    A line that cannot be written, as the disk is full or the directory gone, fails no episode.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)
