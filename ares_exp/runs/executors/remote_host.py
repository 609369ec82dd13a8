"""The run's side of the environment hosts: a client that detects when its host is lost, and proxies of environments."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ares_exp.cancellation import cancel_all, finish, in_daemon_thread, in_thread
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
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import EpisodeStateError, HostLostError, HostsLostError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked, read_asked
from ares_exp.records.results import EnvironmentUsage
from ares_exp.runs.executors.remote_messages import Facts, result_or_failure, unless_failed
from ares_exp.snapshots.snapshot import EnvironmentSnapshot

NEWS_SEC = 5.0
"""Maximum time in seconds that the host waits for news before it sends an empty reply to a poll."""
CANCEL_SEC = 10.0
"""Maximum time in seconds that the run waits until a cancelled call has ended in the host."""
CLOSE_SEC = 120.0
"""Time limit for closing an environment in a host, in seconds."""
KILL_SEC = 30.0
"""Time limit for Ray to kill a host, in seconds."""


@dataclass(eq=False, repr=False, kw_only=True)
class RemoteHost:
    """The run's client of one environment host. It calls the host's methods and processes the host's requests.

    The host is lost if its process has ended, or if it did not reply within the lease time.

    Attributes:
        ray: Imported package `ray`.
        actor: Handle of the Ray actor, an `EnvironmentHost`.
        node: Name of the host's node.
        models: Environments' own models, such as judges, by config key. They stay in the run's process, which
            receives requests to them from the host.
        lease_sec: Number of seconds without a reply after which the host counts as lost. The host uses the same lease
            time.
        on_lost: Function that is called once, when the host is lost or closed.
        guests: Proxies of the environments in the host, by name.
        round_trip_sec: Duration of the last poll for news, in seconds, without the time that the host waited for news.
        why_lost: Reason why the host is lost or closed; `None` before that.
        has_ended: Future that is done when the host is lost or closed.
    """

    ray: Any
    actor: Any
    node: str
    models: Mapping[str, OwnModel]
    lease_sec: float
    on_lost: Callable[[RemoteHost], None] = lambda host: None
    guests: dict[str, RemoteEnvironment] = field(default_factory=dict)
    round_trip_sec: float = 0.0
    why_lost: str | None = None
    has_ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _clients: dict[int, tuple[str | None, LLMClient]] = field(default_factory=dict)
    _answering: WeakValueDictionary[int, asyncio.Task[Any]] = field(default_factory=WeakValueDictionary)

    async def start(self) -> None:
        """Waits for the host's first reply, then polls it in the background. Raises `HostLostError` if it is lost."""
        await self._ask_for_news(0.0)
        self._spawn(self._listen())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the host, and returns its result. Cancelling the call also cancels the method in the host.

        Raises:
            HostLostError: The host is lost.
            BaseException: The method raised this error.
        """
        if self.why_lost is not None:
            raise self._loss()
        sent = self.actor.call.remote(pickle.dumps((method, arguments)))
        try:
            async with self._until_lost(None):
                result = pickle.loads(await sent)
        except asyncio.CancelledError:
            await finish(self._cancel(sent))
            raise
        except self.ray.exceptions.RayError as error:
            self.lose(_in_short(error))
            raise self._loss() from error
        except TimeoutError:
            raise self._loss() from None
        return unless_failed(result, self.node)

    async def _cancel(self, sent: Awaitable[bytes]) -> None:
        async with self._until_lost(CANCEL_SEC):
            self.ray.cancel(sent)
            await sent

    @asynccontextmanager
    async def _until_lost(self, limit_sec: float | None) -> AsyncIterator[None]:
        """Raises `TimeoutError` in the block when the host is lost, or after `limit_sec` seconds."""
        async with asyncio.timeout(limit_sec) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def _loss(self) -> HostLostError:
        return HostLostError(f"The host of environments on {self.node} is lost: {self.why_lost}.")

    def lose(self, why: str) -> None:
        """Marks the host as lost. Calls that are waiting and all later calls raise `HostLostError`. Idempotent."""
        if self.why_lost is None:
            self.why_lost = why
            self.has_ended.set_result(None)
            for wait in self._waits:
                with suppress(RuntimeError):  # the wait has just expired
                    wait.reschedule(0.0)
            self._end_tasks()
            self.on_lost(self)

    def _end_tasks(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def close(self) -> None:
        """Closes all environments of the host, and ends its process. Idempotent."""
        self._end_tasks()
        self.tell("end")
        await asyncio.wait(self._tasks, timeout=CANCEL_SEC)
        self.lose("the run has ended")
        await cancel_all(*self._tasks, within_sec=CANCEL_SEC)
        with suppress(Exception):  # some calls never return if the cluster is broken
            async with asyncio.timeout(KILL_SEC):
                await in_daemon_thread(lambda: self.ray.kill(self.actor))

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of the host in the background, without waiting for its result."""

        async def call() -> None:
            with suppress(HostLostError, EpisodeStateError):  # the host has ended
                await self.call(method, *arguments)

        self._spawn(call())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # News of the host

    async def _listen(self) -> None:
        """Polls the host for news until it is lost. This also renews the lease, so that the host does not end."""
        wait_sec = min(NEWS_SEC, self.lease_sec / 4)
        while self.why_lost is None:
            why = f"it did not respond for {self.lease_sec:g} s"
            lease = asyncio.get_running_loop().call_later(self.lease_sec, self.lose, why)
            try:
                await self._ask_for_news(wait_sec)
            except Exception as error:
                self.lose(f"it cannot be polled: {type(error).__name__}: {error}")
            finally:
                lease.cancel()

    async def _ask_for_news(self, wait_sec: float) -> None:
        started = time.perf_counter()
        waited_sec, found = await self.call("news", wait_sec)
        self.round_trip_sec = time.perf_counter() - started - waited_sec
        for number, method, arguments in found:
            answering = self._spawn(self._heard(number, method, arguments))
            if number is not None:
                self._answering[number] = answering

    async def _heard(self, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        result = await result_or_failure(getattr(self, f"on_{method}"), *arguments)
        if number is not None:
            self.tell("answer", number, result)

    async def on_cancel(self, number: int) -> None:
        """Cancels the call with this number, because its caller in the host was cancelled."""
        if (answering := self._answering.get(number)) is not None:
            answering.cancel()

    async def on_log(self, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, "%s (on %s)", text, self.node)

    async def on_report(self, reports: Mapping[str, EpisodeReport]) -> None:
        for name, report in reports.items():
            if name in self.guests:
                self.guests[name].reported(report)

    async def on_ask_model(
        self, client: int, environment: str | None, key: str, spec: EpisodeSpec, request: LLMRequest
    ) -> LLMResponse:
        """Sends a request from an environment in the host to the environment's own model in the run's process.

        The number `client` identifies the model's client, which is kept for later requests until the environment ends.
        """
        if client not in self._clients:
            guests = self.guests
            self._clients = {n: one for n, one in self._clients.items() if one[0] is None or one[0] in guests}
            self._clients[client] = environment, self.models[key].policy.for_episode(spec)
        return await self.models[key].call(self._clients[client][1], request)

    async def on_background_request(self, environment: str, request: LLMRequest) -> LLMResponse:
        if (guest := self.guests.get(environment)) is None:
            raise EpisodeStateError("The episode has ended, so no more requests are sent to its policy.")
        assert guest.parts.background_client is not None, "the host only asks if the episode has a background client"
        return await guest.parts.background_client(request)

    async def on_read_record(self, environment: str) -> Sequence[Asked] | None:
        guest = self.guests.get(environment)
        if guest is None or guest.parts.output_dir is None:
            return None
        return await asyncio.to_thread(read_asked, guest.parts.output_dir)

    async def on_append_record(self, environment: str, key: str, asked: Asked) -> None:
        """Counts the cost of a call of an environment's own model, and records the call in the files of the episode."""
        self.models[key].count(len(asked.said), asked.usage)
        if (guest := self.guests.get(environment)) is not None:
            guest.asked = (guest.asked or EnvironmentUsage()) + asked.usage
            if guest.parts.output_dir is not None:
                await self.models[key].append_asked(guest.parts.output_dir, asked)


def without_factories(parts: EpisodeParts) -> EpisodeParts:
    """Returns the arguments of an environment that can be sent to a host: all except the factories and the client."""
    nothing: Any = None
    output_dir = parts.output_dir.absolute() if parts.output_dir is not None else None
    return replace(
        parts, container_factory=nothing, code_agent_factory=nothing, background_client=None, output_dir=output_dir
    )


@dataclass(eq=False, repr=False)
class RemoteEnvironment(EnvironmentBase):
    """The run's proxy of an environment in a host. Its properties return values from the host's last reply.

    If the host is lost, calls raise `HostLostError`, and `close` has no effect.

    Attributes:
        parts: Arguments from which the host creates the environment at the first `reset`. The host uses its own
            factories, and sends the agent's background requests to this process.
        may_be_blamed: Whether the loss of the host raises `HostsLostError`, because this attempt may be the cause,
            instead of `HostLostError`.
        name: Name of the environment in the host.
        asked: Usage of the environment's own models in this episode, as counted by the run; `None` if no model was
            called.
    """

    host: RemoteHost
    task_name: str
    parts: EpisodeParts
    may_be_blamed: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: EnvironmentUsage | None = None
    time_step: TimeStep[Any] | None = None
    _facts: Facts = field(default_factory=Facts)
    _facts_at: float = field(default_factory=time.monotonic)
    _calls: OneCallAtATime = field(default_factory=OneCallAtATime)

    # Calls

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        made_from = self.task_name, without_factories(self.parts), self.parts.background_client is not None
        started: TimeStep[Any] = await self._stepped("reset", made_from, seed=seed, options=options)
        return started

    async def step(self, action: Any) -> TimeStep[Any]:
        taken: TimeStep[Any] = await self._stepped("step", action=action)
        return taken

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        taken: TimeStep[Any] | None = await self._stepped("truncate", limit=limit)
        return taken

    async def export_state(self, output_dir: str | Path, *, snapshot_id: str | None = None) -> EnvironmentSnapshot:
        """Writes a snapshot of the environment to `output_dir`, which the host must share with the run."""
        with self._calls.during("export_state()"):
            arguments = {"output_dir": Path(output_dir).absolute(), "snapshot_id": snapshot_id}
            place = await self._acted("export_state", arguments)
            return await asyncio.to_thread(EnvironmentSnapshot.load_from_file, place)

    async def close(self) -> None:
        """Closes the environment in its host. The time step remains available if it is the last of its episode."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        self._facts = self._facts._replace(pending=())
        try:
            if self.name in self.host.guests and self.host.why_lost is None:
                await finish(self._closed())
        finally:
            self.host.guests.pop(self.name, None)

    async def _closed(self) -> None:
        async with asyncio.timeout(CLOSE_SEC):
            await self._acted("close", {})
            if self._facts.has_files:
                await self.host.call("drop", self.name)

    async def _asked_of_host(self, method: str, *arguments: Any) -> Any:
        try:
            return await self.host.call(method, self.name, *arguments)
        except HostLostError as error:
            self.time_step, self._facts = None, self._facts._replace(pending=())
            if not self.may_be_blamed:
                raise
            raise HostsLostError(
                f"{error} The attempt has now lost as many hosts as `executor.lost_per_attempt` allows, so it may be "
                "the cause."
            ) from error

    async def _stepped(self, method: str, made_from: tuple[Any, ...] = (), **arguments: Any) -> Any:
        """Calls a method such as `step`, stores the returned time step in `time_step`, and returns it.

        Returns `None` if the method returned no time step, which is possible for `truncate`.
        """
        with self._calls.during(f"{method}()"):
            if method == "reset":
                self.time_step = self.asked = None
            if (taken := await self._acted(method, arguments, made_from)) is not None:
                self.time_step = taken
            return taken

    async def _acted(self, method: str, arguments: Mapping[str, Any], made_from: tuple[Any, ...] = ()) -> Any:
        """Calls a method of the environment in the host (see `EnvironmentHost.act`). Returns its result.

        Also stores the state of the environment after the call, and fetches new files of the episode from the node.
        """
        self._facts = self._facts._replace(pending=())
        self.host.guests[self.name] = self
        result, self._facts = await self._asked_of_host("act", method, arguments, made_from)
        self._facts_at = time.monotonic()
        if self._facts.step_type is None:
            self.time_step = None
        if self._facts.has_files and self.parts.output_dir is not None:
            await self._fetch_files(self.parts.output_dir)
        return unless_failed(result, self.host.node)

    async def _fetch_files(self, output_dir: Path) -> None:
        with tempfile.TemporaryFile() as archive:
            offset, has_more = 0, True
            while has_more:
                data, has_more = await self._asked_of_host("fetch", offset)
                archive.write(data)
                offset += len(data)
            archive.seek(0)
            most = offset // tarfile.BLOCKSIZE
            await in_thread(lambda: unpack_directory(archive, output_dir, max_bytes=offset, max_members=most))

    # Values that need no call

    def report(self) -> EpisodeReport:
        """Returns the host's last report. Its `environment_usage` is the larger of the host's and the run's counts."""
        report = self._facts.report or EpisodeReport()
        if self.asked is None:
            return report
        used = [one for one in (report.environment_usage, self.asked) if one is not None]
        return replace(report, environment_usage=max(used, key=lambda one: (one.tokens, one.cost)))

    @property
    def step_count(self) -> int:
        return self._facts.step_count

    @property
    def current_task(self) -> str | None:
        """The name of the task. The task object itself is only in the host."""
        return None if self._facts.report is None else self.report().task_name or self.task_name

    @property
    def activity(self) -> Activity | None:
        return self._facts.activity

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The steps before the snapshot that was restored. Empty after the first `step`."""
        return self._facts.past

    @property
    def time_left_sec(self) -> float | None:
        """The number of seconds until the time limit, estimated from the host's last reply and the time since then."""
        left = self._facts.time_left_sec
        if left is None or self.time_step is None or self.time_step.last():
            return None
        return max(0.0, left - (time.monotonic() - self._facts_at))

    def grant_time(self, seconds: float) -> None:
        """Extends the time limit, immediately in this process and soon after in the host."""
        if (left := self._facts.time_left_sec) is not None:
            self._facts = self._facts._replace(time_left_sec=left + seconds)
        if self.name in self.host.guests:
            self.host.tell("grant", self.name, seconds)

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        return self._facts.pending

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        calls = [one.call_id for one in known]
        changed: tuple[PendingRequest, ...] = await self._asked_of_host("changed", calls)
        if not self._calls.in_progress:
            self._facts = self._facts._replace(pending=changed)
        return changed

    def reported(self, report: EpisodeReport) -> None:
        """Stores a report if a call is in progress. Ignores reports that arrive later, because they are outdated."""
        if self._calls.in_progress:
            self._facts = self._facts._replace(report=report)


def _in_short(error: BaseException) -> str:
    """Describes an error from Ray in one line: its class and the last line of its message, which contains the cause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # without colours
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause, _, _ = (lines or [""])[-1].partition("Some common causes include")  # Ray's list is always the same
    return f"{type(error).__name__}: {cause.rstrip(' .')[:300]}"
