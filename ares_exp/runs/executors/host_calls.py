"""The host's side of calls from the run: each message is handled once, and available answers are returned together.

A round trip costs more than the handling of most messages. A call therefore contains all messages that the run has to
send at the moment. It returns when the first message is answered, with all answers and news that are available. Later
answers are returned by later calls. The run always has a call without messages in progress, which waits for them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ares_exp.runs.executors.remote_messages import Failure

CALL_BYTES = 64 * 1024
"""Maximum size of a call or its reply, unless a single message is larger. Ray is slow for objects over 100 kB."""

Method = Callable[..., Awaitable[Any]]
Message = tuple[int, bytes]
"""The number of a message, and the pickled name and arguments of a method."""
Told = tuple[int | None, bytes]
"""A pickled answer with the number of its message, or pickled news (with `None`)."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call whose reply the run may not have received.

    Attributes:
        answer: Future of the reply.
        timer: Timer that ends the wait of the call.
    """

    answer: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    timer: asyncio.TimerHandle | None = None


class HostCalls:
    """Receives calls, handles their messages, and returns answers and news."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """Stores the methods.

        Args:
            methods: Methods that handle messages, by name.
        """
        self._methods = methods
        self._calls: dict[int, _Call] = {}
        self._work: dict[int, asyncio.Task[bytes]] = {}
        self._listening: list[_Call] = []
        self._due: list[_Call] = []
        self._untold: list[Told] = []
        self._will_return = False

    @property
    def work(self) -> list[asyncio.Task[bytes]]:
        """The tasks of messages that are being handled."""
        return [*self._work.values()]

    async def take(
        self, number: int, arrived: Sequence[int], wait_sec: float | None, messages: Sequence[Message]
    ) -> bytes:
        """Handles the messages of a call, unless the call was received before, and returns its reply.

        Args:
            number: Number of the call.
            arrived: Numbers of earlier calls whose replies the run has received.
            wait_sec: Maximum time that a call without messages waits for answers or news, in seconds.
            messages: Messages to handle.
        """
        for one in arrived:
            self._calls.pop(one, None)
        call = self._calls.get(number)
        if call is None:
            call = self._calls[number] = _Call()
            for message in messages:
                self._start(message, call)
            if wait_sec is not None:
                self._listen(call, wait_sec)
        await asyncio.wait({call.answer})
        return call.answer.result()

    def _start(self, message: Message, call: _Call) -> None:
        number, data = message
        task = self._work[number] = asyncio.ensure_future(self._carried_out(data))
        task.add_done_callback(partial(self._answered, number, call))

    async def _carried_out(self, data: bytes) -> bytes:
        try:
            name, arguments = pickle.loads(data)
            return pickle.dumps((True, await self._methods[name](*arguments)))
        except (Exception, SystemExit) as error:
            return failed(error)

    def _answered(self, number: int, call: _Call, task: asyncio.Task[bytes]) -> None:
        del self._work[number]
        self._due.append(call)
        answer = failed(asyncio.CancelledError("it was cancelled")) if task.cancelled() else task.result()
        self._tell((number, answer))

    def tell(self, news: Any) -> None:
        """Sends news to the run."""
        self._tell((None, pickle.dumps(news)))

    async def cancel(self, number: int) -> None:
        """Cancels the handling of a message, and returns when it has ended."""
        if (task := self._work.get(number)) is not None:
            task.cancel()
            await asyncio.wait({task})

    # Replies

    def _listen(self, call: _Call, wait_sec: float) -> None:
        """Makes a call return when answers or news are available, or after `wait_sec`."""
        self._listening.append(call)
        call.timer = asyncio.get_running_loop().call_later(wait_sec, self._give, call)
        if self._untold:
            self._return_soon()

    def _tell(self, told: Told) -> None:
        self._untold.append(told)
        self._return_soon()

    def _return_soon(self) -> None:
        """Schedules the replies after all handlers that are ready now have run."""
        if not self._will_return:
            self._will_return = True
            asyncio.get_running_loop().call_soon(self._return)

    def _return(self) -> None:
        self._will_return = False
        due, self._due = self._due, []
        for call in due:
            self._give(call)
        while self._untold and self._listening:
            self._give(self._listening[0])

    def _give(self, call: _Call) -> None:
        """Makes a call return the available answers and news, up to the maximum size."""
        if call in self._listening:
            self._listening.remove(call)
        if call.timer is not None:
            call.timer.cancel()
        if not call.answer.done():
            call.answer.set_result(pickle.dumps((True, self._some())))

    def _some(self) -> list[Told]:
        count = fitting([len(data) for _, data in self._untold])
        told, self._untold = self._untold[:count], self._untold[count:]
        return told


def fitting(sizes: Sequence[int]) -> int:
    """Returns the number of leading messages of these sizes that fit into one call; at least one."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > CALL_BYTES:
            return count
    return len(sizes)


def failed(error: BaseException) -> bytes:
    """Returns a reply that raises the error in the run."""
    return pickle.dumps((False, Failure.of(error)))
