"""One shell of a sandbox as a stream: what has arrived of its output, and what it was fed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from ares_exp.containers.daytona.relay_script import MAX_FED_BYTES, Chunk, Feed, Place
from ares_exp.containers.shell_channel import StreamLostError
from ares_exp.errors import ContainerError

MAX_CARRIED_BYTES = 30_000
"""Most bytes that one poll feeds, to all shells. In base64 and with the rest it has to stay below 128 KiB."""

_SMALL_BYTES = 4096  # a FIFO takes it in one piece, or not at all
_MAX_QUEUED = 32  # pieces that arrived and were not read


class ShellRelay(Protocol):
    """What a stream needs of its `Relay`."""

    def carry(self, feed: Feed, *, max_bytes: int) -> int: ...  # noqa: D102
    async def feed(self, feed: Feed) -> int: ...  # noqa: D102
    def forget(self, stream: RelayStream) -> None: ...  # noqa: D102
    def has_read(self) -> None: ...  # noqa: D102


class RelayStream:
    """One shell of a sandbox; a `ChannelStream`.

    Attributes:
        place: How far its output has arrived.
        is_resting: Whether nothing is expected of it.
        asked_at: The last poll that was about it; they are counted from 1.
        heard_at: The last one that was answered.
        feeding: The request that feeds it, if one does by itself.
    """

    def __init__(self, relay: ShellRelay, place: Place) -> None:
        """Starts nothing: see `Relay.open`."""
        self.place = place
        self.is_resting = False
        self.asked_at = self.heard_at = 0
        self._relay = relay
        self._arrived: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._fed = 0
        self.feeding: asyncio.Task[int] | None = None
        self._seen_by = 0
        self._ended = self._closed = False
        self._failure: ContainerError | None = None

    @property
    def is_full(self) -> bool:
        """Whether more has arrived than should wait here."""
        return len(self._arrived) >= _MAX_QUEUED

    @property
    def in_doubt(self) -> bool:
        """As of `ChannelStream`: until a poll is answered that began when all was in the sandbox."""
        is_feeding = self.feeding is not None and not self.feeding.done()
        return is_feeding or self.heard_at < self._seen_by

    async def read(self) -> bytes:
        """The next bytes; `b""` at the end.

        Raises:
            StreamLostError: The relay has broken.
        """
        while not self._arrived:
            if self._failure is not None:
                raise StreamLostError(str(self._failure)) from self._failure
            if self._ended:
                return b""
            self._changed.clear()
            await self._changed.wait()
        data = self._arrived.popleft()
        self._relay.has_read()
        return data

    async def write(self, data: bytes) -> None:
        """Sends all of `data`, unless the shell has ended: who reads it sees that, and what it had to say.

        If it is cancelled, what is under way arrives all the same, and `in_doubt` says so.

        Raises:
            OSError: The stream is closed, or the relay has broken.
        """
        for start in range(0, len(data), MAX_FED_BYTES):
            if self._closed:
                raise BrokenPipeError("The shell has been closed.")
            if self._ended:
                return
            feed = Feed(self.place.shell, self._fed, data[start : start + MAX_FED_BYTES])
            self._fed += 1
            is_empty, self.is_resting = self.is_resting, False
            carried = self._relay.carry(feed, max_bytes=MAX_CARRIED_BYTES if is_empty else _SMALL_BYTES)
            if carried:
                self._seen_by = carried
                continue
            feeding = self.feeding = asyncio.create_task(self._relay.feed(feed))
            feeding.add_done_callback(self._has_fed)
            await asyncio.wait({feeding})
            if not feeding.cancelled():
                feeding.result()

    def _has_fed(self, feeding: asyncio.Task[int]) -> None:
        if not feeding.cancelled() and feeding.exception() is None:
            self._seen_by = feeding.result()

    def rest(self) -> None:
        """As of `ChannelStream`."""
        self.is_resting = True

    def close(self) -> None:
        """Ends the shell. Idempotent, never blocks or raises."""
        self._closed = True
        if not self._ended:
            self.end()
            self._relay.forget(self)

    def take(self, chunk: Chunk) -> None:
        """Keeps what has arrived, if it is the next; it may arrive twice."""
        if chunk.data is None:
            self.end()
        elif chunk.number == self.place.next:
            self.place = Place(self.place.shell, self.place.pump, chunk.number + 1)
            self._arrived.append(chunk.data)
            self._changed.set()

    def end(self, failure: ContainerError | None = None) -> None:
        """Nothing more will arrive: the shell has ended, or `failure` keeps it from us."""
        self._ended, self._failure = True, failure
        if self.feeding is not None:
            self.feeding.cancel()
        self._changed.set()
