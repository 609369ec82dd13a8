"""The persistent shells of one container: opened on demand, lent to one script at a time, kept for the next.

A channel returns to the pool by itself, when its shell is ready again or has ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import cast

from ares_exp.containers.container import User
from ares_exp.containers.shell_channel import Channel, ChannelStream
from ares_exp.errors import ContainerDiedError, ContainerError

OPEN_TIMEOUT_SEC = 60.0
"""Bound on opening a channel: a loaded engine takes seconds, a hanging one must not hang us."""

MAX_IDLE = 16  # of each user

MAX_OPENINGS = 8
"""Number of channels per user that are opened at the same time for those who wait for one."""

_STOPPED = "The container has been stopped and runs no more commands."

OpenStream = Callable[[User | None], Awaitable[ChannelStream]]
"""Opens a fresh POSIX `sh` (source from stdin) in the container as that user, `None` being the container's default.

Its working directory is the container's default. Raises `ContainerDiedError` with the reason when the container is
gone, and another `ContainerError` when this user cannot get a shell.
"""


class ShellPool:
    """Channels by user: idle, lent, and the spare that is opened ahead.

    Attributes:
        is_closed: Whether `close` was called.
    """

    def __init__(self, open_stream: OpenStream, try_again: Callable[[str], bool] = lambda why: False) -> None:
        """Opens no channel yet."""
        self.is_closed = False
        self._open_stream = open_stream
        self._try_again = try_again
        self._channels: dict[User | None, set[Channel]] = collections.defaultdict(set)
        self._free: dict[User | None, collections.deque[Channel]] = collections.defaultdict(collections.deque)
        self._spares: dict[User | None, asyncio.Task[None]] = {}
        self._waiting: dict[User | None, collections.deque[asyncio.Future[Channel]]] = collections.defaultdict(
            collections.deque
        )
        self._openings: dict[User | None, set[asyncio.Task[None]]] = collections.defaultdict(set)

    async def fill(self) -> None:
        """Opens the default user's first two channels: one to run a command, one to kill it."""
        opened = await asyncio.gather(self.open(None), self.open(None), return_exceptions=True)
        for one in opened:
            if isinstance(one, BaseException):
                raise one
            self._changed(one)

    async def take(self, user: User | None, *, urgent: bool = False) -> Channel:
        """Returns a ready channel: a free one, one about to become free, or whichever is first of these and new ones.

        Opening one takes an engine longer than most commands take.
        """
        while True:
            if self.is_closed:
                raise ContainerDiedError(_STOPPED)
            if free := self._free[user]:
                return free.popleft()
            if coming := self._coming(user):
                await asyncio.wait(coming, timeout=max(coming.values()), return_when=asyncio.FIRST_COMPLETED)
            else:
                return await self._wait_for_one(user, urgent=urgent)

    async def _wait_for_one(self, user: User | None, *, urgent: bool) -> Channel:
        """Returns the next channel that becomes free, and has as many opened as are waited for."""
        waiting, openings = self._waiting[user], self._openings[user]
        channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        (waiting.appendleft if urgent else waiting.append)(channel)
        if len(openings) < min(MAX_OPENINGS, len(waiting)):
            openings.add(asyncio.create_task(self._open_while_waited_for(user)))
        try:
            return await channel
        except asyncio.CancelledError:
            if channel.done() and not channel.cancelled() and channel.exception() is None:
                self._changed(channel.result())
            raise

    async def _open_while_waited_for(self, user: User | None) -> None:
        """Opens channels one after the other; why one could not be opened is told whoever waited when that started."""
        try:
            while (first := self._next_waiting(user)) is not None:
                try:
                    self._changed(await self.open(user))
                except Exception as error:
                    if not first.done():
                        first.set_exception(error)
        finally:  # at once: who was told an error may ask again before the callbacks of this task are called
            self._openings[user].discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _next_waiting(self, user: User | None) -> asyncio.Future[Channel] | None:
        """Returns the future of the first who waits for a channel, if anybody does; the done ones are removed."""
        waiting = self._waiting[user]
        while waiting and waiting[0].done():
            waiting.popleft()
        return waiting[0] if waiting else None

    async def open(self, user: User | None, *, again: bool = True) -> Channel:
        """Opens a new channel, ready and lent to the caller.

        Args:
            user: Whose shell it is.
            again: Whether `try_again` may be followed, once: a program that an agent put in the place of the shell can
                print any complaint.

        Raises:
            ContainerDiedError: The container is gone, or does not answer.
            ContainerError: This user gets no shell.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_SEC):
                channel = Channel(await self._open_stream(user), user, self._changed)
                try:
                    await asyncio.wait({channel.ready})
                except BaseException:
                    channel.close()
                    raise
        except TimeoutError:
            raise ContainerDiedError(
                f"The container no longer answers: no shell could be opened within {OPEN_TIMEOUT_SEC:.0f} s."
            ) from None
        if self.is_closed:
            channel.close()
            raise ContainerDiedError(_STOPPED)
        channel.raise_if_lost()
        if channel.complaint and not channel.is_open:
            if again and self._try_again(channel.complaint):
                return await self.open(user, again=False)
            raise ContainerError(
                f"No shell could be opened in the container as {user or 'its default user'}: {channel.complaint}"
            )
        if not channel.is_open:
            raise ContainerError("The container runs no commands: a shell opened in it ended at once.")
        self._channels[user].add(channel)
        return channel

    def keep_spare(self, user: User | None) -> None:
        """Opens one more channel in the background if none is or will be free, at most one at a time.

        It alternates with the first when commands follow each other quickly. And it can kill: where a command has used
        up all process numbers, the spare still works, as its next process has already been forked.
        """

        async def open_spare() -> None:
            with contextlib.suppress(ContainerError):  # the next `take` reports the reason
                self._changed(await self.open(user))

        is_opening = user in self._spares and not self._spares[user].done()
        if not (self._free[user] or self._coming(user) or is_opening):
            self._spares[user] = asyncio.create_task(open_spare())

    def idle(self, user: User | None) -> tuple[Channel, ...]:
        """Returns this user's channels that are ready and not lent."""
        return tuple(self._free[user])

    async def close(self) -> None:
        """Closes every channel, lent ones too. Idempotent."""
        self.is_closed = True
        opening = [*self._spares.values(), *(task for tasks in self._openings.values() for task in tasks)]
        for task in opening:
            task.cancel()
        for user in self._waiting:
            while (waiting := self._next_waiting(user)) is not None:
                waiting.set_exception(ContainerDiedError(_STOPPED))
        await asyncio.gather(*opening, return_exceptions=True)
        channels = [one for channels in self._channels.values() for one in channels]
        for channel in channels:
            channel.close()
        if channels:
            await asyncio.wait({channel.listener for channel in channels})

    def _coming(self, user: User | None) -> dict[asyncio.Future[None], float]:
        """Returns the `ready` futures of channels that have just answered, each with the seconds it may take."""
        now = time.monotonic()
        answered = (one for one in self._channels[user] if one.settling_until > now and not one.ready.done())
        return {one.ready: one.settling_until - now for one in answered}

    def _changed(self, channel: Channel) -> None:
        """Gives a ready channel to whoever waits for one, or keeps it; forgets a closed one."""
        known, free = self._channels[channel.user], self._free[channel.user]
        if not channel.is_open:
            known.discard(channel)
            if channel in free:
                free.remove(channel)
        elif channel in known and (waiting := self._next_waiting(channel.user)) is not None and not self.is_closed:
            waiting.set_result(channel)
        elif channel in known and len(free) < MAX_IDLE and not self.is_closed:
            free.append(channel)
        elif channel in known:
            channel.close()
