"""The run's side of a host: calls, the host's questions, and the loss of the host."""

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
"""Maximum time that the host waits for news before it replies without news, in seconds."""
RESEND_SEC = 0.2
"""Wait before a message is sent again, in seconds."""
CANCEL_SEC = 10.0
"""Time limit for a cancelled call to end in the host, in seconds."""

logger = logging.getLogger(__name__)


class Guest(Protocol):
    """The run's representation of an environment in the host.

    Attributes:
        output_dir: Directory for the files of the episode in the run; `None` if no files are kept.
    """

    output_dir: Path | None

    def reported(self, report: EpisodeReport) -> None:
        """Receives a report of a busy environment."""
        ...

    def asked(self, asked: Asked) -> None:
        """Receives a recorded question to the environment's own model."""
        ...

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Sends a background request to the policy. It is cancelled when the episode ends."""
        ...


class RemoteHost:
    """One host. It is lost if its process has ended, or if it has not replied for the time of its lease.

    Attributes:
        node: Name of the host's node.
        guests: Representations of the host's environments, by name.
        round_trip_sec: Last round trip time of a message without a wait, in seconds.
        why_lost: Reason why the host is lost; `None` if it is not lost.
    """

    def __init__(
        self,
        connection: HostConnection,
        *,
        models: Mapping[str, OwnModel],
        lease_sec: float,
        on_lost: Callable[[RemoteHost], None] = lambda host: None,
    ) -> None:
        """Stores the arguments. `start` starts listening.

        Args:
            connection: Connection to the host.
            models: Models of environments, by key. The run sends the environments' requests to them.
            lease_sec: Time without a reply after which the host is lost, in seconds. The host has the same lease.
            on_lost: Function that is called once, when the host is lost.
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
        """Waits until the host replies, and starts listening for news.

        Raises:
            HostLostError: The host is lost.
        """
        await self._exchange(0.0)
        self._spawn(self._listen(), name=f"news of {self.node}")

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the host, and returns its result.

        If this call is cancelled, the method in the host is also cancelled, within `CANCEL_SEC`.

        Raises:
            HostLostError: The host is lost.
            BaseException: The method raised this error.
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
        """Sends a message together with other pending messages, and waits for its answer."""
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
        """Sends all pending messages."""
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
        """Calls the host, and handles the answers and news of its reply.

        Args:
            wait_sec: Maximum time that the host waits for answers or news if there are no messages, in seconds.
            messages: Messages for the host.

        Raises:
            HostLostError: The host is lost.
            BaseException: The host rejected the call with this error.
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
        """Passes an answer to the waiting call."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        try:
            waiting.set_result(pickle.loads(answer))
        except Exception as error:  # unpickling can raise any exception
            waiting.set_exception(error)

    async def _carried(self, call: bytes) -> bytes:
        """Sends a call repeatedly until the host replies or is lost."""
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
        """Treats the host as lost: current and later calls raise `HostLostError`. Only the first call counts."""
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
        """Closes all environments of the host, and ends its process. Idempotent."""
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
        """Asks for news continuously, which also renews the lease."""
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
        """Returns the model's client for a client in the host. It is kept as long as its environment."""
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
        """Sends a message without waiting for an answer."""
        if self.why_lost is None:
            self._spawn(self._tell(method, *arguments))

    async def _tell(self, method: str, *arguments: Any) -> None:
        with suppress(HostLostError):
            await self._answer_to(next(self._numbers), method, arguments)
