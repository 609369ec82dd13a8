"""The remote environment: an environment in a host, with the same contract as an environment in this process."""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ares_exp.cancellation import finish, in_thread
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
from ares_exp.errors import ConfigError, HostLostError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.environment_responses import Asked
from ares_exp.records.results import EnvironmentUsage
from ares_exp.runs.executors.remote_host import RemoteHost
from ares_exp.runs.executors.remote_messages import EnvironmentOrder, Facts, Reply, RequestDecoder, coded_step

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

CHANGED_SEC = 20.0
"""Maximum time that a call for changed requests waits in the host, in seconds."""
CLOSE_SEC = 120.0
"""Time limit for closing an environment in a host, in seconds."""

Find = Callable[[str], Awaitable[RemoteHost]]
"""A function that finds the host for the environment with the given name."""


class RemoteEnvironment(EnvironmentBase):
    """Runs its episodes in a host. Properties return the values of the host's last reply.

    If the host is lost, calls raise `HostLostError`, and closing has no effect.

    Attributes:
        output_dir: Directory for the files of the episode in the run; `None` if no files are kept.
    """

    time_step: TimeStep[Any] | None = None

    def __init__(
        self,
        find: Find,
        *,
        task_name: str,
        order: EnvironmentOrder | None = None,
        output_dir: Path | None = None,
        background_client: LLMClient | None = None,
        loss: Callable[[HostLostError], Exception] = lambda error: error,
    ) -> None:
        """Stores the arguments, without calling a host.

        Args:
            find: Function that finds the host at the first call.
            task_name: Name of the task, if the environment does not report it.
            order: Order from which the host creates the environment; `None` if the host already has it.
            output_dir: Directory for the files of the episode in the run; `None` if no files are kept.
            background_client: Client that responds to the agent's background requests.
            loss: Function that converts the error of a lost host to the raised error.
        """
        self.output_dir = output_dir
        self._find = find
        self._task_name = task_name
        self._order = order
        self._is_made = False
        self._loss = loss
        self._background_client = background_client
        self._background_requests: set[asyncio.Task[LLMResponse]] = set()
        self._name = uuid.uuid4().hex
        self._host: RemoteHost | None = None
        self._facts = Facts()
        self._report = EpisodeReport()
        self._news: EpisodeReport | None = None
        self._facts_at = time.monotonic()
        self._granted_sec = 0.0
        self._decoder = RequestDecoder()
        self._pending: tuple[PendingRequest, ...] = ()
        self._past: list[PastStep] = []
        self._asked: EnvironmentUsage | None = None
        self._calls = OneCallAtATime()
        self._answered_at = 0.0

    # Calls

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode of the environment in the host."""
        with self._calls.during("reset()"):
            self.time_step = None
            self._asked = None
            started = time.perf_counter()
            time_step = _there_is(await self._stepped("reset", {"seed": seed, "options": options}))
            past = (replace(one, time_step=coded_step(one.time_step, self._decoder.decode)) for one in self._facts.past)
            self._past = list(past)
            if self._facts.keeps_past:
                self._note(time_step, None, started, None)
            return time_step

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` and returns the next step."""
        with self._calls.during("step()"):
            started, waited_since = time.perf_counter(), self._answered_at
            time_step = _there_is(await self._stepped("step", {"action": action}))
            if self._past:
                self._note(time_step, action, started, started - waited_since)
            return time_step

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
            host = await self._there()
            forks = [
                RemoteEnvironment(self._find, task_name=self._task_name, order=self._order, loss=self._loss)
                for _ in range(n)
            ]
            facts = await self._asked_of_host("fork", [fork._name for fork in forks], diversify)
            for fork, told in zip(forks, facts, strict=True):
                fork._start_as_fork(host, told, self)
            return forks

    def _start_as_fork(self, host: RemoteHost, facts: Facts, parent: RemoteEnvironment) -> None:
        host.guests[self._name] = self
        self._host, self.time_step, self._past = host, parent.time_step, list(parent._past)
        self._is_made = True
        self._take(facts)
        self._answered_at = time.perf_counter()

    async def close(self) -> None:
        """Closes the environment in its host. A LAST `time_step` remains readable."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        self._pending = ()
        self._end_background_requests()
        host = self._host
        if host is None or self._name not in host.guests:
            return
        try:
            await finish(self._closed(host))
        finally:
            host.guests.pop(self._name, None)
            self._host = None

    async def _closed(self, host: RemoteHost) -> None:
        try:
            async with asyncio.timeout(CLOSE_SEC):
                if host.why_lost is None:
                    await self._acted("close", {})
                    if self._facts.has_files:
                        await host.call("drop", self._name)
        except (HostLostError, TimeoutError):
            return

    async def _there(self) -> RemoteHost:
        """Returns the host, and finds it at the first call and after `close`."""
        if self._host is None:
            host = await self._find(self._name)
            host.guests[self._name] = self
            self._host, self._decoder, self._is_made = host, RequestDecoder(), False
        return self._host

    async def _asked_of_host(self, method: str, *arguments: Any) -> Any:
        host = await self._there()
        try:
            return await host.call(method, self._name, *arguments)
        except HostLostError as error:
            self._facts, self.time_step, self._pending = self._facts._replace(step_type=None), None, ()
            raise self._loss(error) from error

    async def _stepped(self, method: str, arguments: Mapping[str, Any]) -> TimeStep[Any] | None:
        """Calls a method that takes a time step, and returns the step; `None` if no step was taken."""
        before, self._pending = self.time_step, ()
        try:
            sent = await self._acted(method, arguments)
        except BaseException:
            self.time_step = before if self._facts.step_type is not None else None
            raise
        taken = coded_step(sent, self._decoder.decode) if sent is not None else None
        if taken is not None and taken.last():
            self._end_background_requests()
        self.time_step = taken or before
        return taken

    async def _acted(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the environment, and stores the facts and files of the reply."""
        bases = dict(self._decoder.bases)
        order = None if self._is_made or method == "close" else self._order
        known = self._facts.report_number if self._is_made else 0
        reply: Reply = await self._asked_of_host("act", method, arguments, bases, known, order)
        self._is_made = True
        self._decoder.forget(bases)
        self._take(reply.facts)
        if reply.facts.has_files:
            await self._fetch_files()
        if reply.failure is not None:
            raise reply.failure.error(self._host.node if self._host is not None else "a node")
        return reply.value

    def _take(self, facts: Facts) -> None:
        self._facts, self._facts_at, self._granted_sec = facts, time.monotonic(), 0.0
        self._report, self._news = facts.report or self._report, None
        self._pending = self._decoded(facts.pending)
        self._answered_at = time.perf_counter()

    def _decoded(self, pending: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        return tuple(one._replace(request=self._decoder.decode(one.request)) for one in pending)

    def _note(self, time_step: TimeStep[Any], action: Any, started: float, policy_sec: float | None) -> None:
        """Adds a time step to the past steps."""
        response = action if isinstance(action, LLMResponse) else None
        seconds, seen = time.perf_counter() - started, self._facts.activity or Activity()
        self._past.append(PastStep(time_step, response, time.time(), policy_sec, seconds, seen))

    async def _fetch_files(self) -> None:
        """Fetches the files of the ended episode in pieces."""
        if (output_dir := self.output_dir) is None:
            return
        with tempfile.TemporaryFile() as archive:
            offset, has_more = 0, True
            while has_more:
                data, has_more = await self._asked_of_host("fetch", offset)
                archive.write(data)
                offset += len(data)
            await in_thread(lambda: _unpack(archive, output_dir))

    # Values that need no call

    def report(self) -> EpisodeReport:
        """Returns the host's last report. Usage that the run paid for the environment's models is counted here."""
        report = self._news or self._report
        told, counted = report.environment_usage, self._asked
        if counted is not None and (told is None or counted.cost > told.cost or _tokens(counted) > _tokens(told)):
            return replace(report, environment_usage=counted)
        return report

    def reported(self, report: EpisodeReport) -> None:
        """Receives a report of a busy environment. Ignores a report that arrives after the reply."""
        if self._calls.in_progress:
            self._news = report

    def asked(self, asked: Asked) -> None:
        """Counts the usage of a question of the environment."""
        self._asked = asked.usage if self._asked is None else self._asked + asked.usage

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Sends a background request to the policy. It is cancelled when the episode ends."""
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

    @property
    def step_count(self) -> int:
        """The number of time steps after FIRST."""
        return self._facts.step_count

    @property
    def current_task(self) -> str | None:
        """The name of the task. The task itself is in the host."""
        return (self._report.task_name or self._task_name) if self._facts.has_started else None

    @property
    def activity(self) -> Activity | None:
        """The agent's activity in the container during the last call."""
        return self._facts.activity

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The time steps of the running episode; empty if the environment in the host has no past steps."""
        return tuple(self._past)

    @property
    def time_left_sec(self) -> float | None:
        """The time until the time limit in seconds, computed from the host's last reply."""
        left = self._facts.time_left_sec
        if left is None or self.time_step is None or self.time_step.last():
            return None
        return max(0.0, left + self._granted_sec - (time.monotonic() - self._facts_at))

    def grant_time(self, seconds: float) -> None:
        """Extends the time limit, immediately in this process and with the next message in the host."""
        self._granted_sec += seconds
        if self._host is not None:
            self._host.tell("grant", self._name, seconds)

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns the unanswered requests that the host reported."""
        return self._pending

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until the host reports pending requests that differ from `known`."""
        while True:
            bases, calls = dict(self._decoder.bases), [one.call_id for one in known]
            sent = await self._asked_of_host("changed", calls, bases, CHANGED_SEC)
            if sent is not None:
                pending = self._decoded(sent)
                if not self._calls.in_progress:
                    self._pending = pending
                return pending


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
