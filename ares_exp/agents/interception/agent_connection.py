"""One HTTP connection of an agent's client, as aiohttp serves it: whose it is, and whether its last answer arrived."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from ares_exp.agents.interception.line import Line
    from ares_exp.agents.interception.turn import Turn

IDLE_SEC = 600.0
"""How long a connection may be silent between requests, and how long the sending of a body may take."""
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_HEAD_LINE_BYTES = 32 * 1024
MAX_HEADERS = 128

_unused_log = logging.getLogger(f"{__name__}.access")
_unused_log.disabled = True


class Connection(web.RequestHandler):
    """A connection.

    Attributes:
        line: Whose it is.
        served: The call whose answer was the last thing that was written whole to it.
        waits_for: The call whose answer its client waits for.
    """

    def __init__(self, server: web.Server, line: Line) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=_unused_log,
            keepalive_timeout=IDLE_SEC,
            max_line_size=MAX_HEAD_LINE_BYTES,
            max_field_size=MAX_HEAD_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self.line = line
        self.served: Turn | None = None
        self.waits_for: Turn | None = None

    @contextmanager
    def waiting_for(self, turn: Turn) -> Iterator[None]:
        """Counts its client as waiting for an answer, as long as it is there."""
        self.waits_for = turn
        turn.waiting += 1
        try:
            yield
        finally:
            self._wait_no_more()

    def _wait_no_more(self) -> None:
        if self.waits_for is not None:
            self.waits_for.waiting -= 1
            self.waits_for = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Notes that nobody waits any more, and, where the client cut it, that the last answer may not have arrived."""
        self._wait_no_more()
        if exc is not None and self.served is not None:
            self.served.is_delivered = False
        super().connection_lost(exc)
