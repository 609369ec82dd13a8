"""The run's side of an environment host: calls, news, the detection of a lost host, and its environments."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ares_exp.cancellation import finish, in_daemon_thread, in_thread
from ares_exp.containers.activity import Activity
from ares_exp.containers.archive import unpack_directory
from ares_exp.environment import (
    EnvironmentBase,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    PastStep,
    PendingRequest,
    TimeStep,
)
from ares_exp.environments.own_model import OwnModel
from ares_exp.errors import ConfigError, EpisodeStateError, HostLostError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked, read_asked
from ares_exp.records.results import EnvironmentUsage
from ares_exp.runs.executors.remote_messages import EnvironmentOrder, Facts, News, Outcome

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

NEWS_SEC = 5.0
"""Maximum time that the host waits for news before it replies without news, in seconds."""
CANCEL_SEC = 10.0
"""Time limit for a cancelled call to end in the host, in seconds."""
CLOSE_SEC = 120.0
"""Time limit for closing an environment in a host, in seconds."""
KILL_SEC = 30.0
"""Time limit for Ray to kill a host, in seconds."""

GUESSES = "Some common causes include"
"""Start of a generic text in Ray's error messages, which is the same for all causes."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

logger = logging.getLogger(__name__)


class RemoteHost:
    """A host, as seen by the run. It is lost if its process has ended, or if it has not replied within the lease time.

    Each message from the host calls a method whose name starts with `on_`.

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
            lease_sec: Number of seconds without a reply after which the host is lost. The host has the same lease.
            on_lost: Called once, when the host is lost.
        """
        self.node = node
        self.guests: dict[str, RemoteEnvironment] = {}
        self.round_trip_sec = 0.0
        self.why_lost: str | None = None
        self.shares_disk = False
        self._ray = ray
        self._actor = actor
        self._models = models
        self._lease_sec = lease_sec
        self._on_lost = on_lost
        self.has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits: set[asyncio.Timeout] = set()
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
        sent = self._actor.call.remote(pickle.dumps((method, arguments)))
        try:
            async with self._until_lost(None):
                outcome: Outcome = pickle.loads(await sent)
        except asyncio.CancelledError:
            await finish(self._cancel(sent))
            raise
        except self._ray.exceptions.RayError as error:
            self.lose(_in_short(error))
            raise self._loss() from error
        except TimeoutError:
            raise self._loss() from None
        return outcome.result(self.node)

    async def _cancel(self, sent: Awaitable[bytes]) -> None:
        async with self._until_lost(CANCEL_SEC):
            self._ray.cancel(sent)
            await sent

    @asynccontextmanager
    async def _until_lost(self, seconds: float | None) -> AsyncIterator[None]:
        """Raises `TimeoutError` in the block after `seconds`, and as soon as the host is lost."""
        async with asyncio.timeout(seconds) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def _loss(self) -> HostLostError:
        return HostLostError(f"The host on {self.node} is lost: {self.why_lost}.")

    def lose(self, why: str) -> None:
        """Treats the host as lost: current and later calls to it raise `HostLostError`.

        Calling `lose` again has no effect.
        """
        if self.why_lost is None:
            self._give_up(why)
            self._on_lost(self)

    def _give_up(self, why: str) -> None:
        if self.why_lost is None:
            self.why_lost = why
            self.has_ended.set_result(None)
            for wait in self._waits:
                with suppress(RuntimeError):  # the wait has just expired
                    wait.reschedule(0.0)
        self._end_tasks()

    def _end_tasks(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def close(self) -> None:
        """Closes all environments of the host, and ends its process. Idempotent."""
        self._end_tasks()
        ended_by = asyncio.get_running_loop().call_later(CANCEL_SEC, self._give_up, "the run has ended")
        try:
            await self._tell("end")
        finally:
            ended_by.cancel()
            self._give_up("the run has ended")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_SEC)
        with suppress(Exception):  # some calls never return if the cluster is broken
            async with asyncio.timeout(KILL_SEC):
                await in_daemon_thread(lambda: self._ray.kill(self._actor))

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of the host without waiting for it to end."""
        self._spawn(self._tell(method, *arguments))

    async def _tell(self, method: str, *arguments: Any) -> None:
        with suppress(HostLostError, EpisodeStateError):  # the host has ended
            await self.call(method, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # News of the host

    async def _listen(self) -> None:
        """Polls the host for news until it is lost, which also renews the lease."""
        wait_sec = min(NEWS_SEC, self._lease_sec / 4)
        while self.why_lost is None:
            why = f"it gave no sign of life for {self._lease_sec:g} s"
            lease = asyncio.get_running_loop().call_later(self._lease_sec, self.lose, why)
            try:
                await self._ask_for_news(wait_sec)
            except HostLostError:
                return
            except Exception as error:
                self.lose(f"it gave no news: {type(error).__name__}: {error}")
            finally:
                lease.cancel()

    async def _ask_for_news(self, wait_sec: float) -> None:
        started = time.perf_counter()
        waited_sec, found = await self.call("news", wait_sec)
        self.round_trip_sec = time.perf_counter() - started - waited_sec
        for news in found:
            self._spawn(self._heard(news))

    async def _heard(self, news: News) -> None:
        outcome = await Outcome.of(getattr(self, f"on_{news.method}"), *news.arguments)
        if news.number is not None:
            await self._tell("answer", news.number, outcome)

    async def on_log(self, name: str, level: int, text: str) -> None:
        """Logs a warning from the host."""
        logging.getLogger(name).log(level, "%s (on %s)", text, self.node)

    async def on_report(self, reports: Mapping[str, EpisodeReport]) -> None:
        """Passes reports to their environments."""
        for name, report in reports.items():
            if name in self.guests:
                self.guests[name].reported(report)

    async def on_ask_model(
        self, client: int, environment: str | None, key: str, spec: EpisodeSpec, request: LLMRequest
    ) -> LLMResponse:
        """Sends a request from an environment to its model. Keeps an episode's client until its environment ends."""
        if client not in self._clients:
            guests = self.guests
            self._clients = {n: one for n, one in self._clients.items() if one[0] is None or one[0] in guests}

            def on_wait(seconds: float) -> None:
                self.tell("waited", client, seconds)

            bound = EpisodeSpec(spec.task_name, spec.attempt, spec.seed, on_wait=on_wait)
            self._clients[client] = environment, self._models[key].policy.for_episode(bound)
        return await self._models[key].call(self._clients[client][1], request)

    async def on_background_request(self, environment: str, request: LLMRequest) -> LLMResponse:
        """Sends a background request from an agent to the policy. The request is cancelled when the episode ends."""
        if (guest := self.guests.get(environment)) is None:
            raise EpisodeStateError("The episode has ended: its policy is asked for nothing more.")
        return await guest.respond_in_background(request)

    async def on_read_record(self, environment: str) -> Sequence[Asked] | None:
        """Returns the recorded model calls from an episode's environment."""
        files = self._files(environment)
        return await asyncio.to_thread(read_asked, files) if files is not None else None

    async def on_append_record(self, environment: str, key: str, asked: Asked) -> None:
        """Counts the cost of an environment's model call, and appends the call to the record of the episode."""
        self._models[key].count(len(asked.said), asked.usage)
        if (guest := self.guests.get(environment)) is not None:
            guest.asked = (guest.asked or EnvironmentUsage()) + asked.usage
        if (files := self._files(environment)) is not None:
            await self._models[key].append_asked(files, asked)

    def _files(self, environment: str) -> Path | None:
        guest = self.guests.get(environment)
        return guest.output_dir if guest is not None else None


class RemoteEnvironment(EnvironmentBase):
    """An environment whose episodes run in a host. Its properties have the values of the host's last reply.

    If the host is lost, calls raise `HostLostError`, and closing has no effect.

    Attributes:
        output_dir: Directory for the files of the episode in the run; `None` if no files are kept.
        asked: Usage of the environment's own models in this episode, as counted by the run; `None` if there were no
            model calls.
    """

    time_step: TimeStep[Any] | None = None

    def __init__(
        self,
        host: RemoteHost,
        order: EnvironmentOrder,
        *,
        output_dir: Path | None = None,
        background_client: LLMClient | None = None,
        loss: Callable[[HostLostError], Exception] = lambda error: error,
    ) -> None:
        """Stores the arguments, without calling the host.

        Args:
            host: The host.
            order: Order from which the host creates the environment at the first `reset`.
            output_dir: Directory for the files of the episode in the run; `None` if no files are kept.
            background_client: Client that responds to the agent's background requests.
            loss: Converts the `HostLostError` to the error that calls raise.
        """
        self._host = host
        self._order = order
        self._loss = loss
        self._name = uuid.uuid4().hex
        self.output_dir = output_dir
        self._news: EpisodeReport | None = None
        self.asked: EnvironmentUsage | None = None
        self._background_client = background_client
        self._background_requests: set[asyncio.Future[LLMResponse]] = set()
        self._facts = Facts()
        self._facts_at = time.monotonic()
        self._granted_sec = 0.0
        self._pending: tuple[PendingRequest, ...] = ()
        self._calls = OneCallAtATime()

    # Calls

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode of the environment in the host."""
        with self._calls.during("reset()"):
            self.time_step = self.asked = None
            return _there_is(await self._stepped("reset", {"seed": seed, "options": options}))

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next step."""
        with self._calls.during("step()"):
            return _there_is(await self._stepped("step", {"action": action}))

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Ends the episode because of a limit."""
        with self._calls.during("truncate()"):
            return await self._stepped("truncate", {"limit": limit})

    async def export_state(self, output_dir: str | Path, *, snapshot_id: str | None = None) -> EnvironmentSnapshot:
        """Exports the environment to a directory that the run and the host share."""
        from ares_exp.snapshots.snapshot import EnvironmentSnapshot

        with self._calls.during("export_state()"):
            arguments = {"output_dir": Path(output_dir).absolute(), "snapshot_id": snapshot_id}
            place = await self._acted("export_state", arguments)
            return await asyncio.to_thread(EnvironmentSnapshot.load_from_file, place)

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[RemoteEnvironment]:
        """Creates environments in the same host that continue from the current state."""
        if n < 1:
            raise ConfigError(f"Expected fork() to make at least 1 environment, got {n}.")
        with self._calls.during("fork()"):
            forks = [RemoteEnvironment(self._host, self._order, loss=self._loss) for _ in range(n)]
            facts = await self._asked_of_host("fork", [fork._name for fork in forks], diversify)
            for fork, told in zip(forks, facts, strict=True):
                fork.time_step = self.time_step
                fork._host.guests[fork._name] = fork
                fork._take(told)
            return forks

    async def close(self) -> None:
        """Closes the environment in its host. A LAST `time_step` remains readable."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        self._pending = ()
        self._end_background_requests()
        if self._name in self._host.guests:
            try:
                await finish(self._closed())
            finally:
                self._host.guests.pop(self._name, None)

    async def _closed(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SEC):
                if self._host.why_lost is None:
                    await self._acted("close", {})
                    if self._facts.has_files:
                        await self._host.call("drop", self._name)
        except (HostLostError, TimeoutError):
            return

    async def _asked_of_host(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._host.call(method, self._name, *arguments)
        except HostLostError as error:
            self.time_step, self._pending = None, ()
            raise self._loss(error) from error

    async def _stepped(self, method: str, arguments: Mapping[str, Any]) -> TimeStep[Any] | None:
        """Calls a method that may take a time step. Returns the new step; `None` if no step was taken."""
        taken: TimeStep[Any] | None = await self._acted(method, arguments)
        if taken is not None:
            self.time_step = taken
            if taken.last():
                self._end_background_requests()
        return taken

    async def _acted(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the environment in the host. Stores its new state, and fetches its files, if any."""
        self._pending = ()
        self._host.guests[self._name] = self
        order = self._order if method == "reset" else None
        outcome, facts = await self._asked_of_host("act", method, arguments, order)
        self._take(facts)
        if facts.has_files and self.output_dir is not None:
            await self._fetch_files(self.output_dir)
        return outcome.result(self._host.node)

    def _take(self, facts: Facts) -> None:
        self._facts, self._facts_at, self._granted_sec = facts, time.monotonic(), 0.0
        self._pending, self._news = facts.pending, None
        if facts.step_type is None:
            self.time_step = None

    async def _fetch_files(self, output_dir: Path) -> None:
        """Fetches the files of the ended episode in pieces."""
        with tempfile.TemporaryFile() as archive:
            offset, has_more = 0, True
            while has_more:
                data, has_more = await self._asked_of_host("fetch", offset)
                archive.write(data)
                offset += len(data)
            await in_thread(lambda: _unpack(archive, output_dir))

    # Values that need no call

    def report(self) -> EpisodeReport:
        """Returns the host's last report, with the model usage that the run counted if that usage is larger."""
        report = self._news or self._facts.report or EpisodeReport()
        told, counted = report.environment_usage, self.asked
        if counted is not None and (told is None or counted.cost > told.cost or _tokens(counted) > _tokens(told)):
            return replace(report, environment_usage=counted)
        return report

    @property
    def step_count(self) -> int:
        """The number of time steps after FIRST."""
        return self._facts.step_count

    @property
    def current_task(self) -> str | None:
        """The name of the task. The task itself is in the host."""
        return None if self._facts.report is None else self.report().task_name or self._order.task_name

    @property
    def activity(self) -> Activity | None:
        """The agent's activity in the container during the last call."""
        return self._facts.activity

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The earlier time steps of a restored episode. Empty after its next step, and in other episodes."""
        return self._facts.past

    @property
    def time_left_sec(self) -> float | None:
        """The number of seconds until the time limit, computed from the host's last reply."""
        left = self._facts.time_left_sec
        if left is None or self.time_step is None or self.time_step.last():
            return None
        return max(0.0, left + self._granted_sec - (time.monotonic() - self._facts_at))

    def grant_time(self, seconds: float) -> None:
        """Extends the time limit: in this process immediately, and in the host soon after."""
        self._granted_sec += seconds
        if self._name in self._host.guests:
            self._host.tell("grant", self._name, seconds)

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns the unanswered requests that the host reported."""
        return self._pending

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until the host reports pending requests that differ from `known`."""
        calls = [one.call_id for one in known]
        changed: tuple[PendingRequest, ...] = await self._asked_of_host("changed", calls)
        if not self._calls.in_progress:
            self._pending = changed
        return changed

    def reported(self, report: EpisodeReport) -> None:
        """Stores a report that the host sent during a call. Ignores a report that arrives after the call."""
        if self._calls.in_progress:
            self._news = report

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Sends a background request to the policy. The request is cancelled when the episode ends."""
        assert self._background_client is not None, "the host asks only if the episode has a background client"
        answering = asyncio.ensure_future(self._background_client(request))
        self._background_requests.add(answering)
        try:
            return await answering
        finally:
            answering.cancel()
            self._background_requests.discard(answering)

    def _end_background_requests(self) -> None:
        for answering in self._background_requests:
            answering.cancel()


def _there_is(time_step: TimeStep[Any] | None) -> TimeStep[Any]:
    assert time_step is not None, "only `truncate` may take none"
    return time_step


def _tokens(used: EnvironmentUsage) -> int:
    return used.prompt_tokens + used.generated_tokens


def _unpack(archive: IO[bytes], output_dir: Path) -> None:
    """Unpacks the archive that a host sent. Blocking.

    Raises:
        TransferError: A name in the archive is outside of `output_dir`, or the archive is broken.
    """
    size = archive.tell()
    archive.seek(0)
    unpack_directory(archive, output_dir, max_bytes=size, max_members=size // tarfile.BLOCKSIZE)


def _in_short(error: BaseException) -> str:
    """Returns the class of an error and the last line of its message, which has the cause in Ray's errors."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    cause, _, _ = (lines or [""])[-1].partition(GUESSES)
    return f"{type(error).__name__}: {cause.rstrip(' .')[:300]}"
