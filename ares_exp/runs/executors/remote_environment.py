"""The remote environment: an environment in a host, with the same contract as an environment in this process."""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
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
from ares_exp.llms.request import LLMClient
from ares_exp.records.results import EnvironmentUsage
from ares_exp.runs.executors.remote_host import Guest, RemoteHost
from ares_exp.runs.executors.remote_messages import EnvironmentOrder, Facts, Reply

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

CHANGED_SEC = 20.0
"""Maximum time that a call for changed requests waits in the host, in seconds."""
CLOSE_SEC = 120.0
"""Time limit for closing an environment in a host, in seconds."""


class RemoteEnvironment(EnvironmentBase):
    """Runs its episodes in a host. Properties return the values of the host's last reply.

    If the host is lost, calls raise `HostLostError`, and closing has no effect.
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
            loss: Function that converts the error of a lost host to the raised error.
        """
        self._host = host
        self._order = order
        self._loss = loss
        self._name = uuid.uuid4().hex
        self._guest = Guest(output_dir, background_client)
        self._facts = Facts()
        self._facts_at = time.monotonic()
        self._granted_sec = 0.0
        self._pending: tuple[PendingRequest, ...] = ()
        self._calls = OneCallAtATime()

    # Calls

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode of the environment in the host."""
        with self._calls.during("reset()"):
            self.time_step = self._guest.asked = None
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
                fork._host.guests[fork._name] = fork._guest
                fork._take(told)
            return forks

    async def close(self) -> None:
        """Closes the environment in its host. A LAST `time_step` remains readable."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        self._pending = ()
        self._guest.end_background_requests()
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
            self._facts, self.time_step, self._pending = self._facts._replace(step_type=None), None, ()
            raise self._loss(error) from error

    async def _stepped(self, method: str, arguments: Mapping[str, Any]) -> TimeStep[Any] | None:
        """Calls a method that takes a time step, and returns the step; `None` if no step was taken."""
        before, self._pending = self.time_step, ()
        try:
            taken: TimeStep[Any] | None = await self._acted(method, arguments)
        except BaseException:
            self.time_step = before if self._facts.step_type is not None else None
            raise
        if taken is not None and taken.last():
            self._guest.end_background_requests()
        self.time_step = taken or before
        return taken

    async def _acted(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the environment, and stores the facts and files of the reply."""
        self._host.guests[self._name] = self._guest
        self._guest.is_busy = True
        order = self._order if method == "reset" else None
        try:
            reply: Reply = await self._asked_of_host("act", method, arguments, order)
        finally:
            self._guest.is_busy, self._guest.news = False, None
        self._take(reply.facts)
        if reply.facts.has_files:
            await self._fetch_files()
        succeeded, value = reply.outcome
        if not succeeded:
            raise value.error(self._host.node)
        return value

    def _take(self, facts: Facts) -> None:
        self._facts, self._facts_at, self._granted_sec = facts, time.monotonic(), 0.0
        self._pending = facts.pending

    async def _fetch_files(self) -> None:
        """Fetches the files of the ended episode in pieces."""
        if (output_dir := self._guest.output_dir) is None:
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
        report = self._guest.news or self._facts.report
        told, counted = report.environment_usage, self._guest.asked
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
        return (self.report().task_name or self._order.task_name) if self._facts.has_started else None

    @property
    def activity(self) -> Activity | None:
        """The agent's activity in the container during the last call."""
        return self._facts.activity

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The time steps of a restored episode, until its next step. Later, and in other episodes, empty."""
        return self._facts.past

    @property
    def time_left_sec(self) -> float | None:
        """The time until the time limit in seconds, computed from the host's last reply."""
        left = self._facts.time_left_sec
        if left is None or self.time_step is None or self.time_step.last():
            return None
        return max(0.0, left + self._granted_sec - (time.monotonic() - self._facts_at))

    def grant_time(self, seconds: float) -> None:
        """Extends the time limit, immediately in this process and soon in the host."""
        self._granted_sec += seconds
        if self._name in self._host.guests:
            self._host.tell("grant", self._name, seconds)

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns the unanswered requests that the host reported."""
        return self._pending

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until the host reports pending requests that differ from `known`."""
        calls = [one.call_id for one in known]
        while (pending := await self._asked_of_host("changed", calls, CHANGED_SEC)) is None:
            pass
        changed: tuple[PendingRequest, ...] = pending
        if not self._calls.in_progress:
            self._pending = changed
        return changed


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
