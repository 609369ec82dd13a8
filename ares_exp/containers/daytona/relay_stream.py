"""A stream over the relay for one shell of a sandbox."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from ares_exp.containers.daytona.relay_script import MAX_FED_BYTES, Chunk, Feed, OutputPosition
from ares_exp.containers.shell_channel import StreamLostError
from ares_exp.errors import ContainerError

MAX_CARRIED_BYTES = 30_000
"""Bound on the bytes that one poll feeds to all shells: in base64 with the script they stay below 128 KiB."""

_SMALL_BYTES = 4096  # a FIFO takes it in one piece or not at all
_MAX_QUEUED = 32  # arrived but unread pieces


class ShellRelay(Protocol):
    """The part of a `Relay` that a stream uses."""

    def carry(self, feed: Feed, *, max_bytes: int) -> int: ...
    async def feed(self, feed: Feed) -> int: ...
    def forget(self, stream: RelayStream) -> None: ...
    def has_read(self) -> None: ...


class RelayStream:
    """A `ChannelStream` of one shell of a sandbox.

    Attributes:
        position: The position up to which its output has arrived.
        is_resting: Whether no output is expected.
        asked_at: The last poll that included it, counted from 1.
        heard_at: The last such poll that was answered.
        feeding: The separate request that feeds it, if any.
        is_answered: Whether output is expected soon after input.
    """

    def __init__(self, relay: ShellRelay, position: OutputPosition, *, is_answered: bool = True) -> None:
        self.position = position
        self.is_answered = is_answered
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
        """Whether too many unread pieces have arrived."""
        return len(self._arrived) >= _MAX_QUEUED

    @property
    def in_doubt(self) -> bool:
        """As `ChannelStream.in_doubt`: until the answer of a poll that started after all input had arrived."""
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
        """Sends all of `data`, unless the shell has ended, which the reader sees after its last output.

        After a cancellation, data in transit still arrives, and `in_doubt` is set.

        Raises:
            OSError: The stream is closed, or the relay has broken.
        """
        for start in range(0, len(data), MAX_FED_BYTES):
            if self._closed:
                raise BrokenPipeError("The shell has been closed.")
            if self._ended:
                return
            feed = Feed(self.position.shell, self._fed, data[start : start + MAX_FED_BYTES])
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
        self.is_resting = True

    def close(self) -> None:
        """Ends the shell. Idempotent, never blocks or raises."""
        self._closed = True
        if not self._ended:
            self.end()
            self._relay.forget(self)

    def take(self, chunk: Chunk) -> None:
        """Keeps a chunk if it is the next; chunks may arrive twice."""
        if chunk.data is None:
            self.end()
        elif chunk.number == self.position.next:
            self.position = OutputPosition(self.position.shell, self.position.pump, chunk.number + 1)
            self._arrived.append(chunk.data)
            self._changed.set()

    def end(self, failure: ContainerError | None = None) -> None:
        """Ends the output: the shell has ended, or `failure` broke the relay."""
        self._ended, self._failure = True, failure
        if self.feeding is not None:
            self.feeding.cancel()
        self._changed.set()
