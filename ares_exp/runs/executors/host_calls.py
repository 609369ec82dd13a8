"""Calls of a run as its host takes them: each message is carried out once, and answers that are ready leave together.

To carry bytes there and back costs more than most messages themselves. So a call has all messages that the run had to
send at that moment, and returns when the first of them is answered, with all that is to be told by then. What is
answered later goes with later calls; one without messages, which the run always has in progress, waits for it.
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
"""What a call or its answer carries, but for a message that is larger: Ray sends what is over 100 kB by another way,
which is slow."""

Method = Callable[..., Awaitable[Any]]
Message = tuple[int, bytes]
"""Its number, and pickled the name of a method and its arguments."""
Told = tuple[int | None, bytes]
"""An answer with the number of its message, or news (`None`), pickled."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call whose answer the run may not have.

    Attributes:
        answer: Done when it returns.
        timer: Ends its wait.
    """

    answer: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    timer: asyncio.TimerHandle | None = None


class HostCalls:
    """Takes calls, has their messages carried out, and returns what there is to tell."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """Starts nothing.

        Args:
            methods: What carries messages out, by name.
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
        """The tasks of messages that are being carried out."""
        return [*self._work.values()]

    async def take(
        self, number: int, arrived: Sequence[int], wait_sec: float | None, messages: Sequence[Message]
    ) -> bytes:
        """Has messages carried out, unless the call came before, and returns its answer.

        Args:
            number: Of the call.
            arrived: Numbers of earlier calls whose answers the run has.
            wait_sec: For how long a call without messages waits for something to tell.
            messages: What is to be carried out.
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
        """Has the run told news."""
        self._tell((None, pickle.dumps(news)))

    async def cancel(self, number: int) -> None:
        """Cancels what carries a message out, and returns when it has ended."""
        if (task := self._work.get(number)) is not None:
            task.cancel()
            await asyncio.wait({task})

    # What returns

    def _listen(self, call: _Call, wait_sec: float) -> None:
        """Has a call return as soon as there is something to tell, or after so many seconds."""
        self._listening.append(call)
        call.timer = asyncio.get_running_loop().call_later(wait_sec, self._give, call)
        if self._untold:
            self._return_soon()

    def _tell(self, told: Told) -> None:
        self._untold.append(told)
        self._return_soon()

    def _return_soon(self) -> None:
        """Has what is ready told once all that is ready now has been carried out."""
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
        """Has a call return what is to be told, as much as it carries."""
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
    """Returns how many of these, in their order, one call carries; the first at least."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > CALL_BYTES:
            return count
    return len(sizes)


def failed(error: BaseException) -> bytes:
    """Returns the answer that raises an error in the run."""
    return pickle.dumps((False, Failure.of(error)))
