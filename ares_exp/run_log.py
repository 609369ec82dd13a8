"""The handler of `run.log`."""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper


class RunLogHandler(logging.FileHandler):
    """A file handler that never raises: `logging.FileHandler` does where the file cannot be opened (again).

    A line that cannot be written, as the disk is full or the directory gone, fails no episode. A link in the place of
    the file is not followed: the directory of a run that is resumed may come from anybody.
    """

    def _open(self) -> TextIOWrapper:
        def open_itself(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o666)

        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=open_itself)  # type: ignore[return-value]

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)
