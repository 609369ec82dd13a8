"""The run's side of a host: calls, the host's news, and the loss of the host."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.cancellation import finish, in_daemon_thread
from ares_exp.environment import EpisodeReport
from ares_exp.environments.own_model import OwnModel
from ares_exp.errors import EpisodeStateError, HostLostError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked, read_asked
from ares_exp.records.results import EnvironmentUsage
from ares_exp.runs.executors.remote_messages import Failure, News, Outcome

NEWS_SEC = 5.0
"""Maximum time that the host waits for news before it replies without news, in seconds."""
CANCEL_SEC = 10.0
"""Time limit for a cancelled call to end in the host, in seconds."""
KILL_SEC = 30.0
"""Time limit for Ray to kill a host, in seconds."""

GUESSES = "Some common causes include"
"""Start of a generic text in Ray's error messages, which is the same for all causes."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Guest:
    """An environment in the host, from the point of view of the run.

    Attributes:
        output_dir: Directory for the files of the episode in the run; `None` if no files are kept.
        background_client: Client that responds to the agent's background requests.
        background_requests: Background requests that wait for a response.
        news: Report that arrived during the call in progress; `None` if there is no call or no news.
        is_busy: Whether a call is in progress.
        asked: Usage of the environment's models that the run paid for in this episode.
    """

    output_dir: Path | None = None
    background_client: LLMClient | None = None
    background_requests: set[asyncio.Future[LLMResponse]] = field(default_factory=set)
    news: EpisodeReport | None = None
    is_busy: bool = False
    asked: EnvironmentUsage | None = None

    def end_background_requests(self) -> None:
        """Cancels background requests, because the episode has ended."""
        for answering in self.background_requests:
            answering.cancel()


class RemoteHost:
    """One host. It is lost if its process has ended, or if it has not replied for the time of its lease.

    Methods that start with `on_` handle the news of the host.

    Attributes:
        node: Name of the host's node.
        guests: The host's environments, by name.
        round_trip_sec: Last round trip time of a call, in seconds.
        why_lost: Reason why the host is lost; `None` if it is not lost.
        shares_disk: Whether the host can write to the run directory.
        has_ended: Future that is done when the host is lost or closed.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        *,
        node: str,
        models: Mapping[str, OwnModel],
        lease_sec: float,
        on_lost: Callable[[RemoteHost], None] = lambda host: None,
    ) -> None:
        """Stores the arguments. `start` starts listening.

        Args:
            ray: Package Ray.
            actor: Handle of the Ray actor, an `EnvironmentHost`.
            node: Name of the host's node.
            models: Models of environments, by key. The run sends the environments' requests to them.
            lease_sec: Time without a reply after which the host is lost, in seconds. The host has the same lease.
            on_lost: Function that is called once, when the host is lost.
        """
        self.node = node
        self.guests: dict[str, Guest] = {}
        self.round_trip_sec = 0.0
        self.why_lost: str | None = None
        self.shares_disk = False
        self._ray = ray
        self._actor = actor
        self._models = models
        self._lease_sec = lease_sec
        self._on_lost = on_lost
        self.has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients: dict[int, tuple[str | None, LLMClient]] = {}

    async def start(self) -> None:
        """Waits until the host replies, and starts listening for news.

        Raises:
            HostLostError: The host is lost.
        """
        await self._ask_for_news(0.0)
        self._spawn(self._listen())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the host, and returns its result.

        If this call is cancelled, the method in the host is also cancelled, and has ended within `CANCEL_SEC`.

        Raises:
            HostLostError: The host is lost.
            BaseException: The method raised this error.
        """
        if self.why_lost is not None:
            raise self._loss()
        sent = self._actor.call.remote(method, *arguments)
        reply = asyncio.ensure_future(sent)
        try:
            await asyncio.wait({reply, self.has_ended}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            with suppress(Exception):  # the cluster may be broken
                self._ray.cancel(sent)
            await finish(asyncio.wait({reply, self.has_ended}, timeout=CANCEL_SEC, return_when=asyncio.FIRST_COMPLETED))
            raise
        finally:
            reply.cancel()
            reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())  # marks it as retrieved
        if self.why_lost is not None:
            raise self._loss()
        succeeded, value = self._outcome(reply)
        if succeeded:
            return value
        raise value.error(self.node)

    def _outcome(self, reply: asyncio.Future[Outcome]) -> Outcome:
        exceptions = self._ray.exceptions
        try:
            return reply.result()
        except (exceptions.RayTaskError, exceptions.RaySystemError):  # the result cannot be pickled or unpickled
            raise
        except exceptions.RayError as error:
            self.lose(_in_short(error))
            raise self._loss() from error

    def _loss(self) -> HostLostError:
        return HostLostError(f"The host on {self.node} is lost: {self.why_lost}.")

    def lose(self, why: str) -> None:
        """Treats the host as lost: current and later calls raise `HostLostError`. Only the first call counts."""
        if self.why_lost is None:
            self._give_up(why)
            self._on_lost(self)

    def _give_up(self, why: str) -> None:
        self.why_lost = why
        self.has_ended.set_result(None)
        self._end_tasks()

    def _end_tasks(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def close(self) -> None:
        """Closes all environments of the host, and ends its process. Idempotent."""
        self._end_tasks()
        if self.why_lost is None:
            with suppress(TimeoutError, HostLostError):
                async with asyncio.timeout(CANCEL_SEC):
                    await self.call("end")
        if self.why_lost is None:
            self._give_up("the run has ended")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_SEC)
        with suppress(Exception):  # some calls never return if the cluster is broken
            async with asyncio.timeout(KILL_SEC):
                await in_daemon_thread(lambda: self._ray.kill(self._actor))

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of the host without waiting for its end."""
        self._spawn(self._tell(method, *arguments))

    async def _tell(self, method: str, *arguments: Any) -> None:
        with suppress(HostLostError):
            await self.call(method, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # News of the host

    async def _listen(self) -> None:
        """Asks for news continuously, which also renews the lease."""
        wait_sec = min(NEWS_SEC, self._lease_sec / 4)
        while self.why_lost is None:
            try:
                async with asyncio.timeout(self._lease_sec):
                    await self._ask_for_news(wait_sec)
            except TimeoutError:
                self.lose(f"it gave no sign of life for {self._lease_sec:g} s")
            except HostLostError:
                return
            except Exception as error:
                self.lose(f"it gave no news: {type(error).__name__}: {error}")

    async def _ask_for_news(self, wait_sec: float) -> None:
        started = time.perf_counter()
        waited_sec, found = await self.call("news", wait_sec)
        self.round_trip_sec = time.perf_counter() - started - waited_sec
        for news in found:
            self._spawn(self._heard(news))

    async def _heard(self, news: News) -> None:
        outcome: Outcome
        try:
            outcome = True, await getattr(self, f"on_{news.method}")(*news.arguments)
        except (Exception, SystemExit) as error:
            outcome = False, Failure.of(error)
        if news.number is not None:
            await self._tell("answer", news.number, outcome)

    async def on_log(self, name: str, level: int, text: str) -> None:
        """Logs a warning of the host."""
        logging.getLogger(name).log(level, "%s (on %s)", text, self.node)

    async def on_report(self, environment: str, report: EpisodeReport) -> None:
        """Receives a report of a busy environment. Ignores a report that arrives after the reply."""
        if (guest := self.guests.get(environment)) is not None and guest.is_busy:
            guest.news = report

    async def on_ask_model(
        self, client: int, environment: str | None, key: str, spec: EpisodeSpec, request: LLMRequest
    ) -> LLMResponse:
        """Sends a request of an environment to its model. The episode's client is kept as long as its environment."""
        if client not in self._clients:
            guests = self.guests
            self._clients = {n: one for n, one in self._clients.items() if one[0] is None or one[0] in guests}

            def on_wait(seconds: float) -> None:
                self.tell("waited", client, seconds)

            bound = EpisodeSpec(spec.task_name, spec.attempt, spec.seed, on_wait=on_wait)
            self._clients[client] = environment, self._models[key].policy.for_episode(bound)
        return await self._models[key].call(self._clients[client][1], request)

    async def on_background_request(self, environment: str, request: LLMRequest) -> LLMResponse:
        """Sends a background request of an agent to the policy. It is cancelled when the episode ends."""
        guest = self.guests.get(environment)
        if guest is None or guest.background_client is None:
            raise EpisodeStateError("The episode has ended: its policy is asked for nothing more.")
        answering = asyncio.ensure_future(guest.background_client(request))
        guest.background_requests.add(answering)
        try:
            return await answering
        finally:
            answering.cancel()
            guest.background_requests.discard(answering)

    async def on_read_record(self, environment: str) -> Sequence[Asked] | None:
        """Reads the record of an episode's questions."""
        files = self._files(environment)
        return await asyncio.to_thread(read_asked, files) if files is not None else None

    async def on_append_record(self, environment: str, key: str, asked: Asked) -> None:
        """Counts a question of an environment, and appends it to the record of the episode."""
        self._models[key].count(len(asked.said), asked.usage)
        if (guest := self.guests.get(environment)) is not None:
            guest.asked = asked.usage if guest.asked is None else guest.asked + asked.usage
        if (files := self._files(environment)) is not None:
            await self._models[key].append_asked(files, asked)

    def _files(self, environment: str) -> Path | None:
        guest = self.guests.get(environment)
        return guest.output_dir if guest is not None else None


def _in_short(error: BaseException) -> str:
    """Returns the class of an error and the last line of its message, which has the cause in Ray's errors."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    cause, _, _ = (lines or [""])[-1].partition(GUESSES)
    return f"{type(error).__name__}: {cause.rstrip(' .')[:300]}"
