"""The persistent shells of one container: opened when they are needed, lent to one script at a time, kept for the next.

A channel comes back by itself, when its shell is ready again or has ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable

from ares_exp.containers.container import Shell, User
from ares_exp.containers.shell_channel import Channel, ChannelStream
from ares_exp.errors import ContainerDiedError, ContainerError

OPEN_TIMEOUT_SEC = 60.0
"""Bound on opening a channel: an engine under load takes seconds, one that hangs must not hang us."""

MAX_IDLE = 16
"""How many channels of one user are kept while nobody uses them."""

_STOPPED = "The container has been stopped: it runs no more commands."

OpenStream = Callable[[User | None], Awaitable[ChannelStream]]
"""Opens a fresh POSIX `sh` (source from stdin) in the container as that user, `None` being the container's default.

Its working directory is the container's default one. It raises `ContainerDiedError` with the reason when the
container is gone, and another `ContainerError` when this user cannot have a shell.
"""


class ShellStock:
    """Channels by user: the idle, the lent, and the one that is opened ahead.

    Attributes:
        is_closed: Whether there are no channels any more, nor ever will be.
    """

    def __init__(
        self, open_stream: OpenStream, shell: Shell, try_again: Callable[[str], bool] = lambda why: False
    ) -> None:
        """Keeps what is needed to open channels; opens none yet.

        Args:
            open_stream: Opens one shell.
            shell: What their commands are most likely read by.
            try_again: Is told why a stream was no shell, and says whether another one may be.
        """
        self.is_closed = False
        self._open_stream = open_stream
        self._shell: Shell = shell
        self._try_again = try_again
        self._channels: dict[User | None, set[Channel]] = collections.defaultdict(set)
        self._free: dict[User | None, collections.deque[Channel]] = collections.defaultdict(collections.deque)
        self._spares: dict[User | None, asyncio.Task[None]] = {}

    async def fill(self) -> None:
        """Opens the default user's first two channels: one to run a command, one to end it.

        Raises:
            ContainerError: No shell can be had; `ContainerDiedError` when the container is gone.
        """
        opened = await asyncio.gather(self.open(None), self.open(None), return_exceptions=True)
        for one in opened:
            if isinstance(one, BaseException):
                raise one
            self._changed(one)

    async def take(self, user: User | None) -> Channel:
        """A channel that is ready: a free one, one that will be free in a moment, or a new one.

        Raises:
            ContainerError: As `open`.
        """
        while True:
            if self.is_closed:
                raise ContainerDiedError(_STOPPED)
            if free := self._free[user]:
                return free.popleft()
            if coming := self._coming(user):
                await asyncio.wait(coming, timeout=max(coming.values()), return_when=asyncio.FIRST_COMPLETED)
            else:
                return await self.open(user)

    async def open(self, user: User | None, *, again: bool = True) -> Channel:
        """A new channel, ready and nobody else's.

        Args:
            user: Whose shell it is.
            again: Whether another one may be opened in its place: one alone, as what an agent has put into the place of
                the shell can complain of anything.

        Raises:
            ContainerDiedError: The container is gone, or does not answer.
            ContainerError: It gives this user no shell.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_SEC):
                channel = Channel(await self._open_stream(user), user, self._shell, self._changed)
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
            raise ContainerError("The container runs no command: a shell that was opened in it ended at once.")
        self._channels[user].add(channel)
        return channel

    def keep_spare(self, user: User | None) -> None:
        """Opens one more channel in the background where none is or will be free, at most once at a time.

        It takes turns with the first when commands follow each other quickly. And it can kill: a command that has left
        no process number for a new shell does not keep one from it, since its next process has been forked already.
        """

        async def open_spare() -> None:
            with contextlib.suppress(ContainerError):  # whoever needs a channel will learn why there is none
                self._changed(await self.open(user))

        if self._free[user] or self._coming(user):
            return
        if user not in self._spares or self._spares[user].done():
            self._spares[user] = asyncio.create_task(open_spare())

    def idle(self, user: User | None) -> tuple[Channel, ...]:
        """This user's channels that are ready and not lent."""
        return tuple(self._free[user])

    async def close(self) -> None:
        """Closes every channel, the lent ones too. Idempotent."""
        self.is_closed = True
        spares = list(self._spares.values())
        for task in spares:
            task.cancel()
        await asyncio.gather(*spares, return_exceptions=True)
        channels = [one for channels in self._channels.values() for one in channels]
        for channel in channels:
            channel.close()
        await asyncio.gather(*(channel.wait_closed() for channel in channels))

    def _coming(self, user: User | None) -> dict[asyncio.Future[None], float]:
        """What channels that have just answered will be ready by, and how many seconds that may take."""
        now = time.monotonic()
        return {one.ready: one.settling_until - now for one in self._channels[user] if one.settling_until > now}

    def _changed(self, channel: Channel) -> None:
        """Keeps a channel that is ready, and forgets one that has closed."""
        known, free = self._channels[channel.user], self._free[channel.user]
        if not channel.is_open:
            known.discard(channel)
            if channel in free:
                free.remove(channel)
        elif channel in known and len(free) < MAX_IDLE and not self.is_closed:
            free.append(channel)
        elif channel in known:
            channel.close()
