"""A host as the run sees it: calls, the host's questions, and its loss."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from ares_exp.cancellation import finish
from ares_exp.environment import EpisodeReport
from ares_exp.environments.own_model import OwnModel
from ares_exp.errors import EpisodeStateError, HostLostError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked, read_asked
from ares_exp.runs.executors.host_calls import Message, fitting
from ares_exp.runs.executors.host_connection import ConnectionDoubtfulError, ConnectionLostError, HostConnection
from ares_exp.runs.executors.remote_messages import (
    AppendRecord,
    AskModel,
    ClientOfModel,
    Failure,
    Logged,
    News,
    Question,
    ReadRecord,
    Reported,
    RespondInBackground,
)

NEWS_SEC = 5.0
"""How long the host may keep a question for news, while there are none."""
RESEND_SEC = 0.2
"""Wait before a message is sent again."""
CANCEL_SEC = 10.0
"""How long a cancelled call may take to end in the host."""

logger = logging.getLogger(__name__)


class Guest(Protocol):
    """What the run has in the place of an environment of the host.

    Attributes:
        output_dir: Where files of its episode are kept in the run; `None`: nowhere.
    """

    output_dir: Path | None

    def reported(self, report: EpisodeReport) -> None:
        """Takes a report that came while the environment is busy."""
        ...

    def asked(self, asked: Asked) -> None:
        """Takes a question of the environment's own model that is on record now."""
        ...

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Has the policy answer a background request, as long as the episode goes on."""
        ...


class RemoteHost:
    """One host. It is lost when its process has ended, or has given no sign of life for the lease.

    Attributes:
        node: Name of the node that it is on.
        guests: What stands for its environments, by name.
        round_trip_sec: The last round trip of a message that waits for nothing.
        why_lost: Why it is lost; `None` while it is not.
    """

    def __init__(
        self,
        connection: HostConnection,
        *,
        models: Mapping[str, OwnModel],
        lease_sec: float,
        on_lost: Callable[[RemoteHost], None] = lambda host: None,
    ) -> None:
        """Keeps the arguments; `start` starts to listen.

        Args:
            connection: To the host.
            models: The models of environments that the run asks for them, by key.
            lease_sec: After how many seconds without a sign of life it is lost. The host has the same.
            on_lost: Called once, when it is lost.
        """
        self.node = connection.node
        self.guests: dict[str, Guest] = {}
        self.round_trip_sec = 0.0
        self.why_lost: str | None = None
        self._connection = connection
        self._models = models
        self._lease_sec = lease_sec
        self._on_lost = on_lost
        self._call_numbers, self._numbers = count(), count()
        self._arrived: list[int] = []
        self._to_send: list[Message] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients: dict[int, tuple[str | None, LLMClient]] = {}

    async def start(self) -> None:
        """Waits until the host answers, and starts to listen to it. Raises `HostLostError`."""
        await self._exchange(0.0)
        self._spawn(self._listen(), name=f"news of {self.node}")

    async def call(self, method: str, *arguments: Any) -> Any:
        """Has the host carry out a method, and returns what that returns.

        Cancelled, it has the host cancel the method, too, and waits for that for a while.

        Raises:
            HostLostError: The host is lost.
            BaseException: What the method raised.
        """
        number = next(self._numbers)
        try:
            return await self._answer_to(number, method, arguments)
        except asyncio.CancelledError:
            await finish(self._cancel(number))
            raise

    async def _cancel(self, number: int) -> None:
        with suppress(TimeoutError, HostLostError):
            async with asyncio.timeout(CANCEL_SEC):
                await self._answer_to(next(self._numbers), "cancel", (number,))

    async def _answer_to(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Sends a message with all others of this moment, and waits for its answer."""
        if self.why_lost is not None:
            raise self._loss()
        message = (number, pickle.dumps((method, arguments)))
        loop = asyncio.get_running_loop()
        waiting = self._waiting[number] = loop.create_future()
        if not self._to_send:
            loop.call_soon(self._send)
        self._to_send.append(message)
        try:
            returned, value = await waiting
        finally:
            self._waiting.pop(number, None)
        if returned:
            return value
        raise value.error(self.node)

    def _send(self) -> None:
        """Sends the messages that were made since the last time."""
        while self._to_send and self.why_lost is None:
            some = fitting([len(data) for _, data in self._to_send])
            sent, self._to_send = self._to_send[:some], self._to_send[some:]
            self._spawn(self._sent(sent))
        self._to_send = []

    async def _sent(self, messages: Sequence[Message]) -> None:
        try:
            await self._exchange(None, messages)
        except HostLostError:
            return
        except Exception as error:
            failure = Failure.of(error)
            for number, _ in messages:
                self._settle(number, pickle.dumps((False, failure)))

    async def _exchange(self, wait_sec: float | None, messages: Sequence[Message] = ()) -> None:
        """Calls the host, and takes what it tells with its answer.

        Args:
            wait_sec: For how long the host waits for something to tell when there are no messages.
            messages: To be carried out.

        Raises:
            HostLostError: The host is lost.
            BaseException: Why the host takes no calls.
        """
        number, arrived = next(self._call_numbers), tuple(self._arrived)
        self._arrived.clear()
        returned, told = pickle.loads(await self._carried(pickle.dumps((number, arrived, wait_sec, messages))))
        self._arrived.append(number)
        if not returned:
            raise told.error(self.node)
        for answered, data in told:
            if answered is None:
                self._take(pickle.loads(data))
            else:
                self._settle(answered, data)

    def _settle(self, number: int, answer: bytes) -> None:
        """Hands an answer to what waits for it."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        try:
            waiting.set_result(pickle.loads(answer))
        except Exception as error:  # what is in it may be anything
            waiting.set_exception(error)

    async def _carried(self, call: bytes) -> bytes:
        """Sends a call until it is answered, or the host is lost."""
        while self.why_lost is None:
            try:
                return await self._connection.send(call)
            except ConnectionLostError as error:
                self.lose(str(error))
            except ConnectionDoubtfulError:
                await asyncio.sleep(RESEND_SEC)
        raise self._loss()

    def _loss(self) -> HostLostError:
        return HostLostError(f"The host on {self.node} is lost: {self.why_lost}.")

    def lose(self, why: str) -> None:
        """Gives the host up: calls in progress and to come raise `HostLostError`. Only the first time counts."""
        if self.why_lost is not None:
            return
        self._give_up(why)
        self._end_tasks()
        self._on_lost(self)

    def _give_up(self, why: str) -> None:
        self.why_lost = why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._loss())

    async def close(self) -> None:
        """Has the host close everything, and ends its process. Idempotent."""
        if self.why_lost is None:
            with suppress(TimeoutError, HostLostError):
                async with asyncio.timeout(CANCEL_SEC):
                    await self._answer_to(next(self._numbers), "end", ())
            self._give_up("the run has ended")
        tasks = {*self._tasks}
        self._end_tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SEC)
        await self._connection.end()

    def _end_tasks(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    def _spawn(self, work: Any, *, name: str | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        """Asks for news all the time, which also keeps the lease."""
        wait_sec = min(NEWS_SEC, self._lease_sec / 4)
        measured_at = -math.inf
        while self.why_lost is None:
            try:
                async with asyncio.timeout(self._lease_sec):
                    started = time.perf_counter()
                    if started - measured_at > wait_sec:
                        measured_at = started
                        await self._exchange(0.0)
                        self.round_trip_sec = time.perf_counter() - started
                    await self._exchange(wait_sec)
            except TimeoutError:
                self.lose(f"it gave no sign of life for {self._lease_sec:g} s")
            except HostLostError:
                return
            except Exception as error:
                self.lose(f"it gave no news: {type(error).__name__}: {error}")

    def _take(self, news: News) -> None:
        match news:
            case Question():
                self._spawn(self._answer(news))
            case Reported(environment, report):
                if (guest := self.guests.get(environment)) is not None:
                    guest.reported(report)
            case Logged(name, level, text):
                logging.getLogger(name).log(level, "%s (on %s)", text, self.node)

    async def _answer(self, question: Question) -> None:
        value, failure = None, None
        try:
            value = await self._answered(question)
        except (Exception, SystemExit) as error:
            failure = Failure.of(error)
        with suppress(HostLostError):
            await self._answer_to(next(self._numbers), "answer", (question.number, value, failure))

    async def _answered(self, question: Question) -> Any:
        match question:
            case AskModel(_, of, request):
                return await self._models[of.key].call(self._client(of), request)
            case RespondInBackground(_, environment, request):
                if (guest := self.guests.get(environment)) is None:
                    raise EpisodeStateError("The episode has ended: its policy is asked for nothing more.")
                return await guest.respond_in_background(request)
            case ReadRecord(_, environment):
                files = self._files(environment)
                return await asyncio.to_thread(read_asked, files) if files is not None else None
            case AppendRecord(_, environment, key, asked):
                self._models[key].count(len(asked.said), asked.usage)
                if (guest := self.guests.get(environment)) is not None:
                    guest.asked(asked)
                if (files := self._files(environment)) is not None:
                    await self._models[key].append_asked(files, asked)
        return None

    def _files(self, environment: str) -> Path | None:
        guest = self.guests.get(environment)
        return guest.output_dir if guest is not None else None

    def _client(self, of: ClientOfModel) -> LLMClient:
        """Returns the client that a host's client stands for; it is kept as long as its environment."""
        if of.number not in self._clients:
            self._forget_clients()

            def on_wait(seconds: float) -> None:
                self._spawn(self._tell("waited", of.number, seconds))

            spec = EpisodeSpec(of.task_name, of.attempt, of.seed, on_wait=on_wait)
            self._clients[of.number] = (of.environment, self._models[of.key].policy.for_episode(spec))
        return self._clients[of.number][1]

    def _forget_clients(self) -> None:
        kept = {number: one for number, one in self._clients.items() if one[0] is None or one[0] in self.guests}
        self._clients = kept

    def tell(self, method: str, *arguments: Any) -> None:
        """Sends a message without an answer."""
        if self.why_lost is None:
            self._spawn(self._tell(method, *arguments))

    async def _tell(self, method: str, *arguments: Any) -> None:
        with suppress(HostLostError):
            await self._answer_to(next(self._numbers), method, arguments)
