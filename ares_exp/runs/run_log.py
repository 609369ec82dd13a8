"""`run.log` of a run that a script plays, beside the logging that the script has configured."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ares_exp.records.run_dir import RunLogHandler
from ares_exp.records.secrets import RepeatedWarnings, SecretFilter, typed_secrets


@contextmanager
def run_log(config: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[None]:
    """Writes what is logged inside the block to `run.log`; the script's handlers get what they would get without.

    Where the script has no handlers, warnings go to standard error, as those of the command.

    Args:
        config: What Hydra would configure the logging with: the names and formats of its handlers are used.
        overrides: The overrides of the run; secrets among them are masked.
    """
    root, ours = logging.getLogger(), logging.getLogger("ares_exp")
    handlers, formats = config.get("handlers", {}), config.get("formatters", {})
    added: list[logging.Handler] = []
    if (file := handlers.get("file", {}).get("filename")) is not None:
        added.append(_formatted(RunLogHandler(file, delay=True), formats.get("file")))
    if not root.handlers:
        terminal = _formatted(logging.StreamHandler(sys.stderr), formats.get("terminal"))
        terminal.setLevel(logging.WARNING)
        terminal.addFilter(RepeatedWarnings())
        added.append(terminal)
    for handler in added:
        handler.addFilter(SecretFilter(typed_secrets(overrides)))
    before = ours.level, ours.propagate
    passing_on = _PassingOn(ours.getEffectiveLevel(), added[:1] if file is not None else [])
    for handler in added:
        root.addHandler(handler)
    ours.addHandler(passing_on)
    ours.setLevel(min(logging.INFO, ours.getEffectiveLevel()))
    ours.propagate = False
    try:
        yield
    finally:
        ours.removeHandler(passing_on)
        ours.setLevel(before[0])
        ours.propagate = before[1]
        for handler in added:
            root.removeHandler(handler)
            handler.close()


def _formatted(handler: logging.Handler, formatter: Mapping[str, Any] | None) -> logging.Handler:
    handler.setFormatter(logging.Formatter((formatter or {}).get("format")))
    return handler


class _PassingOn(logging.Handler):
    """Gives records to the root's handlers: all to those of the run, to the others those from a level on."""

    def __init__(self, level: int, every: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._from, self._every = level, every

    def emit(self, record: logging.LogRecord) -> None:
        """Passes a record on."""
        for handler in logging.getLogger().handlers:
            wanted = handler in self._every or record.levelno >= self._from
            if wanted and record.levelno >= handler.level:
                handler.handle(record)
