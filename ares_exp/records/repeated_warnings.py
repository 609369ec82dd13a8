"""Repeated warnings: of each kind a terminal gets the first, and at the end their number."""

from __future__ import annotations

import logging
import re
from collections import Counter

SHOWN_CHARS = 160


class RepeatedWarnings(logging.Filter):
    """Lets the first warning of each kind pass, and counts the others. Errors always pass.

    Two warnings are of one kind if they were logged with the same words around their values.
    """

    def __init__(self) -> None:
        """Starts with nothing said."""
        super().__init__()
        self._first: dict[tuple[str, str], str] = {}
        self._more: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is to be shown."""
        if record.levelno != logging.WARNING:
            return True
        kind = record.name, record.__dict__.get("kind") or kind_of(record)
        if kind not in self._first:
            self._first[kind] = record.getMessage()
            return True
        self._more[kind] += 1
        return False

    def told(self) -> list[str]:
        """Returns a line for each kind that came again, and forgets the numbers."""
        more, self._more = self._more, Counter()
        return [f"{count:,} more like this in run.log: {_short(self._first[kind])}" for kind, count in more.items()]


def kind_of(record: logging.LogRecord) -> str:
    """Returns the words around the values of a record, or its first value if its text starts with one."""
    template = str(record.msg)
    if not template.startswith("%"):
        return template
    first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return f"{template} {re.sub(r'[0-9]+', '0', str(first))}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARS else f"{flat[:SHOWN_CHARS]}…"
