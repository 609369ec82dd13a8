"""The current phase of an episode, and the seconds in each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Measures the phases of an episode, one at a time.

    Attributes:
        phase: The phase in progress: `start`, `agent` or `verify`; `None` between two.
        seconds: Wall seconds by phase.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.phase: str | None = None
        self.seconds = seconds or {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Adds the wall seconds spent inside."""
        started = time.perf_counter()
        self.phase = phase
        try:
            yield
        finally:
            self.phase = None
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
