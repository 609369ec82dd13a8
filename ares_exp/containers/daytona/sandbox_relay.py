"""Persistent shells in a sandbox, over a service that only runs commands and returns their output.

While output is expected of any shell, one request, the poll, waits in the sandbox for the first of it; input of a shell
travels with the poll, or in a separate request. See `relay_script` for the side in the sandbox. So a short command
costs one request until its answer, and one more behind it; a long one, a request every twenty seconds; an idle relay
none. A broken connection only costs a repeated request.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable

from ares_exp.containers.container import User
from ares_exp.containers.daytona.relay_script import (
    NO_DIRECTORY,
    Chunk,
    Feed,
    OutputPosition,
    chunks,
    close_script,
    feed_script,
    open_script,
    opened,
    poll_script,
)
from ares_exp.containers.daytona.relay_stream import MAX_CARRIED_BYTES, RelayStream
from ares_exp.containers.shell_channel import StreamLostError
from ares_exp.errors import ContainerDiedError, ContainerError

POLL_SEC = 20.0
"""Time that a poll waits in the sandbox. Proxies cut connections that are silent for longer."""

_FEED_SEC = 60.0
_MAX_ASKED = 100  # shells, in one poll
# A poll without an answer for so long after a feed may have been stopped by a signal.
_OVERDUE_SEC = 1.0
# Polls that are killed in the sandbox return at once; so many in a row are deliberate.
_MAX_IN_VAIN = 20
_PAUSE_SEC = 0.1

Execute = Callable[[str, float], Awaitable[tuple[int, str]]]
"""Runs a script as root, with a time limit in seconds; returns its exit code and output.

It may run it twice. Raises `ContainerError`: the sandbox is gone, or the service does not answer.
"""


class Relay:
    """The shells of one sandbox.

    Attributes:
        directory: The relay's directory in the sandbox: only root may enter it; exists once a shell does.
    """

    def __init__(self, execute: Execute) -> None:
        """Starts nothing.

        Args:
            execute: Runs a command in the sandbox.
        """
        self._execute = execute
        self._key = secrets.token_hex(8)
        self.directory = f"/tmp/.ares_exp-{self._key}"
        self._streams: dict[int, RelayStream] = {}
        self._count = 0
        self._generation = 0
        self._pending: list[Feed] = []
        self._poll: asyncio.Task[tuple[int, str]] | None = None
        self._room = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._failure: ContainerError | None = None
        self._closed = False

    @property
    def failure(self) -> ContainerError | None:
        """The error that broke the relay, if any."""
        return self._failure

    async def open(self, user: User | None, *, is_answered: bool = True) -> RelayStream:
        """Starts a shell of that user, `None` being root.

        Args:
            user: The user.
            is_answered: Whether what is written has an answer, so that the poll is asked anew where none comes.

        Raises:
            ContainerDiedError: The relay is closed, or the sandbox is gone.
            ContainerError: The service does not answer, or no shell can be started.
        """
        shell = self._count
        self._count += 1
        exit_code, answer = await self._execute(open_script(self.directory, self._key, shell, user), _FEED_SEC)
        try:
            pump = opened(self._key, answer)
        except ValueError as error:
            raise ContainerError(
                f"No shell could be started in the sandbox (exit code {exit_code}): {error}"
            ) from error
        if self._closed:
            raise ContainerDiedError("The container has been stopped and runs no more commands.")
        stream = self._streams[shell] = RelayStream(self, OutputPosition(shell, pump, 0), is_answered=is_answered)
        self._failure = None
        self._room.set()
        self._poll_anew()
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen())
            self._listener.add_done_callback(self._listened)
        return stream

    def carry(self, feed: Feed, *, max_bytes: int) -> int:
        """Sends a shell's input with the next poll, if one is about to start.

        Args:
            feed: Input of a shell that is not resting.
            max_bytes: The free space of the shell's FIFO.

        Returns:
            As `feed`; 0: not sent, use `feed`.
        """
        room = min(max_bytes, MAX_CARRIED_BYTES - sum(len(one.data) for one in self._pending))
        if self._poll is not None or len(feed.data) > room or self._is_idle:
            return 0
        self._pending.append(feed)
        self._room.set()
        return self._generation + 2

    async def feed(self, feed: Feed) -> int:
        """Sends a shell's input.

        Returns:
            The first poll that starts after its arrival in the sandbox; compare `RelayStream.heard_at`.

        Raises:
            OSError: It cannot be sent.
        """
        generation = self._generation
        self._room.set()  # output is expected from now on
        try:
            exit_code, _ = await self._execute(feed_script(self.directory, feed), _FEED_SEC)
        except ContainerError as error:
            self._break(error)
            raise StreamLostError(str(error)) from error
        if exit_code == NO_DIRECTORY:
            self._end_all()
        if exit_code != 0:
            raise BrokenPipeError(f"A shell of the sandbox could not be fed (exit code {exit_code}).")
        if (stream := self._streams.get(feed.shell)) is not None and stream.is_answered:
            asyncio.get_running_loop().call_later(_OVERDUE_SEC, self._poll_anew, generation)
        return self._generation + 1

    def forget(self, stream: RelayStream) -> None:
        """Ends a shell, in the background."""
        self._room.set()
        if self._streams.pop(stream.position.shell, None) is None or self._closed:
            return
        ending = asyncio.create_task(self._end(stream.position))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def has_read(self) -> None:
        """Notes that a stream has room for more output."""
        self._room.set()

    async def close(self) -> None:
        """Ends every stream; the shells end with their sandbox. Idempotent."""
        self._closed = True
        feeding = [stream.feeding for stream in self._streams.values()]
        self._end_all()
        tasks = {task for task in (self._listener, self._poll, *self._endings, *feeding) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def _is_idle(self) -> bool:
        """Returns whether no output is expected of any shell whose stream has room."""
        return all(stream.is_resting or stream.is_full for stream in self._streams.values())

    def _to_ask(self) -> list[RelayStream]:
        """Returns the shells of the next poll; if there are too many, the least recently polled ones.

        Resting shells are included, as output may be expected of them before the poll is answered.
        """
        open_ones = (stream for stream in self._streams.values() if not stream.is_full)
        return sorted(open_ones, key=lambda stream: (stream.is_resting, stream.asked_at))[:_MAX_ASKED]

    def _poll_anew(self, generation: int | None = None) -> None:
        """Replaces the waiting poll by a new one.

        Args:
            generation: Replace it only if it is still this one; `None`: in any case.
        """
        if self._poll is not None and generation in (None, self._generation):
            self._poll.cancel()

    async def _listen(self) -> None:
        """Polls whenever output is expected of a shell, while there are shells."""
        in_vain = 0
        while self._streams:
            if self._is_idle:
                self._room.clear()
                await self._room.wait()
                continue
            self._generation += 1
            asked = self._to_ask()
            for stream in asked:
                stream.asked_at = self._generation
            carried, positions = tuple(self._pending), [stream.position for stream in asked]
            script = poll_script(self.directory, self._key, self._generation, carried, positions, POLL_SEC)
            started_at = time.monotonic()
            poll = self._poll = asyncio.ensure_future(self._execute(script, POLL_SEC))
            try:
                await asyncio.wait({poll})
            except asyncio.CancelledError:
                poll.cancel()
                raise
            self._poll = None
            if poll.cancelled():
                continue
            try:
                exit_code, answer = poll.result()
                arrived = chunks(self._key, answer) if exit_code != NO_DIRECTORY else []
            except ContainerError as error:
                self._break(error)
                return
            except ValueError as error:
                self._break(ContainerError(f"Something in the sandbox answers in the place of its shells: {error}"))
                return
            if exit_code == NO_DIRECTORY:
                self._end_all()
                return
            for stream in asked:
                stream.heard_at = self._generation
            del self._pending[: len(carried)]
            for chunk in arrived:
                self._take(chunk)
            in_vain = 0 if arrived or time.monotonic() - started_at > POLL_SEC / 2 else in_vain + 1
            if in_vain > _MAX_IN_VAIN:
                self._break(
                    ContainerError(f"The sandbox ends commands at once (exit code {exit_code}): {answer[-200:]!r}.")
                )
                return
            # A reader usually feeds next, and the next poll takes the feed along.
            await asyncio.sleep(_PAUSE_SEC if in_vain else 0)

    def _listened(self, listener: asyncio.Task[None]) -> None:
        """Ends all streams after the listener has ended, so that no reader waits forever."""
        if not listener.cancelled() and (error := listener.exception()) is not None:
            self._break(ContainerError(f"The shells of the sandbox are lost: {type(error).__name__}: {error}"))

    def _take(self, chunk: Chunk) -> None:
        stream = self._streams.get(chunk.shell)
        if stream is None:
            return
        stream.take(chunk)
        if chunk.data is None:
            self.forget(stream)

    async def _end(self, position: OutputPosition) -> None:
        with contextlib.suppress(ContainerError):  # it ends with the sandbox
            await self._execute(close_script(self.directory, position), _FEED_SEC)

    def _break(self, failure: ContainerError) -> None:
        self._failure = failure
        self._end_all(failure)

    def _end_all(self, failure: ContainerError | None = None) -> None:
        self._room.set()
        streams, self._streams = self._streams, {}
        self._pending.clear()
        for stream in streams.values():
            stream.end(failure)
