"""The options of the config group `snapshot`: when a run takes snapshots, and which snapshots it keeps.

The wrapper `SnapshottingEnvironment` takes them while the policy computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, validate_call

from ares_exp.cancellation import finish
from ares_exp.environment import (
    Environment,
    EnvironmentBase,
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    MinimalEnvironment,
    TimeStep,
)

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

logger = logging.getLogger(__name__)


class NoSnapshots:
    """`snapshot=none`: episodes run without snapshots."""

    output_dir: Path | None = None
    is_only_to_continue: bool = False

    def around(self, env: EnvironmentBase, *, episode_id: str) -> EnvironmentBase:
        """Returns `env` unchanged, so that no snapshots are taken."""
        return env

    def collect_garbage(self) -> None:
        """Does nothing, because there are no snapshots."""


class SnapshotSchedule:
    """Takes a snapshot at every n-th step of each episode of a run, and deletes snapshots that are no longer needed.

    Attributes:
        output_dir: Directory of the snapshot store.
        timeout_sec: Time limit of one snapshot in seconds.
        is_only_to_continue: Whether the snapshots only serve to continue episodes. If so, a run requires an agent that
            can be restored.
    """

    @validate_call
    def __init__(
        self,
        output_dir: Path,
        *,
        every: Annotated[int, Field(ge=1)] | None,
        keep: Annotated[int, Field(ge=1)] | None = None,
        success_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None,
        timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0,
        gc: bool = True,
    ) -> None:
        """Stores the options without side effects.

        Args:
            output_dir: Directory of the snapshot store. The first snapshot creates it.
            every: Number of applied responses between two snapshots: 1 means every step, 5 means steps 0, 5, 10, …
                Snapshots are taken while the environment waits for an action. With `None`, they are taken only on
                request.
            keep: Number of snapshots to keep per episode; the oldest ones are deleted. `None` keeps all.
            success_reward: Smallest reward of a successful episode. The snapshots of an episode with at least this
                reward are deleted at its end. `None` keeps all of them.
            timeout_sec: Time limit of a snapshot in seconds. A snapshot that takes longer is cancelled, reported and
                counted as failed.
            gc: Whether to remove the objects of deleted snapshots at the end of the run. Use `False` if several runs
                write to one store.
        """
        from ares_exp.snapshots.store import SnapshotStore

        self.output_dir = output_dir
        self.timeout_sec = timeout_sec
        self.is_only_to_continue = every is not None and success_reward is None
        self._every = every
        self._keep = keep
        self._success_reward = success_reward
        self._gc = gc
        self._store = SnapshotStore(output_dir)
        self._has_garbage = False
        self._told: set[str] = set()

    def around(self, env: EnvironmentBase, *, episode_id: str) -> EnvironmentBase:
        """Returns `env` in a wrapper that takes snapshots by this schedule."""
        return SnapshottingEnvironment(env, self, episode_id=episode_id)

    def due(self, step_count: int) -> bool:
        """Returns whether a snapshot must be taken after this number of applied responses."""
        return self._every is not None and step_count % self._every == 0

    def surplus(self, snapshot_ids: list[str]) -> list[str]:
        """Returns the ids of an episode's oldest snapshots, which exceed the number of snapshots to keep."""
        return snapshot_ids[: -self._keep] if self._keep is not None else []

    def is_success(self, reward: float | None) -> bool:
        """Returns whether `reward` is at least `success_reward`, so that the episode's snapshots must be deleted."""
        return self._success_reward is not None and reward is not None and reward >= self._success_reward

    def delete(self, snapshot_id: str) -> None:
        """Deletes a snapshot from the store. Its objects remain until `collect_garbage`. Blocking."""
        self._has_garbage = True
        self._store.delete(snapshot_id)

    def collect_garbage(self) -> None:
        """Removes the objects that only deleted or failed snapshots needed, if the option `gc` is set. Blocking."""
        if self._gc and self._has_garbage:
            freed = self._store.gc(grace_sec=0.0)  # safe: writers hold the lock until their snapshot is committed
            if freed.skipped is not None:
                logger.warning("%s", freed.skipped)

    def report(self, what: str, error: Exception) -> None:
        """Logs that a snapshot could not be taken or deleted. `what` is the subject of the message.

        Only the first failure with the same cause is a warning, because on a full disk every snapshot fails.
        """
        self._has_garbage = True
        words = (word for word in str(error).split() if word.isalpha())  # no names, paths or numbers
        cause = f"{type(error).__name__}: {' '.join(words)}"
        level = logging.INFO if cause in self._told else logging.WARNING
        self._told.add(cause)
        logger.log(level, "%s: %s: %s", what, type(error).__name__, error)


CANCEL_GRACE_SEC = 3.0
"""Time limit in seconds for the clean-up of a snapshot that is cancelled together with its episode."""

UNWIND_SEC = 600.0
"""Time limit in seconds for the clean-up of a snapshot that exceeded its own limit. The environment's next call waits
for this clean-up."""


class SnapshottingEnvironment(EnvironmentWrapper):
    """A wrapper that takes snapshots of an environment by a schedule. It does not change actions and time steps.

    When `reset()` or `step()` returns FIRST or MID, a snapshot starts, and is taken while the policy computes the
    response. The next call waits until the snapshot is complete. A failed snapshot is logged and counted, but never
    changes the episode. If the episode, or a call that waits for a snapshot, is cancelled, the snapshot is cancelled as
    well. If the episode ends in another way, the snapshot is completed first.

    Attributes:
        snapshots: Ids `<episode_id>@<step>` of the episode's snapshots in the store, oldest first.
        snapshot_failures: Number of snapshots that could not be taken or deleted.
    """

    def __init__(self, env: MinimalEnvironment, schedule: SnapshotSchedule, *, episode_id: str | None = None) -> None:
        """Wraps `env`, which needs `export_state`. `episode_id` is the first episode's id; later ids are random."""
        super().__init__(env)
        self._schedule = schedule
        self._episode_id = episode_id or uuid.uuid4().hex
        self._started = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._capture: asyncio.Task[None] | None = None
        self._waits_for_action = False
        self._wanted = False
        self._waited_sec = 0.0
        self.snapshots: list[str] = []
        self.snapshot_failures = 0

    def report(self) -> EpisodeReport:
        """Returns the environment's report. Adds the snapshots, and the time spent on waiting for them."""
        report = super().report()
        return replace(
            report,
            phase_sec={**report.phase_sec, "snapshot": self._waited_sec},
            snapshots=tuple(self.snapshots),
            snapshot_failures=self.snapshot_failures,
        )

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode of the wrapped environment, and takes a snapshot of its FIRST step if one is due."""
        await self.wait_for_snapshot()
        self._waits_for_action = False
        if self._started:
            self._episode_id = uuid.uuid4().hex
        self._started = True
        self._waited_sec, self.snapshots, self.snapshot_failures = 0.0, [], 0
        return self._seen(await super().reset(seed=seed, options=options))

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action`. If the episode ends with a reward of at least `success_reward`, deletes its snapshots."""
        await self.wait_for_snapshot()
        self._waits_for_action = False
        time_step = self._seen(await super().step(action))
        if time_step.step_type == "LAST" and self._schedule.is_success(time_step.reward):
            await self._delete(self.snapshots)
        return time_step

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Waits for the snapshot in progress, then truncates the episode."""
        await self.wait_for_snapshot()
        last = await super().truncate(limit)
        return self._seen(last) if last is not None else None

    async def export_state(
        self, output_dir: str | Path | None = None, *, snapshot_id: str | None = None
    ) -> EnvironmentSnapshot:
        """Waits for the snapshot in progress, then exports the wrapped environment as a new snapshot.

        Without arguments, the snapshot is written to the schedule's store and added to `snapshots`.
        """
        await self.wait_for_snapshot()
        if output_dir is not None or snapshot_id is not None:
            return await super().export_state(output_dir or self._schedule.output_dir, snapshot_id=snapshot_id)
        snapshot = await super().export_state(self._schedule.output_dir, snapshot_id=self._name)
        self.snapshots = [name for name in self.snapshots if name != self._name] + [self._name]
        return snapshot

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[Environment]:
        """Waits for the snapshot in progress, then forks the wrapped environment. The forks do not take snapshots."""
        await self.wait_for_snapshot()
        return await super().fork(n, diversify=diversify)

    def request_snapshot(self) -> None:
        """Requests a snapshot, which is taken as soon as the environment waits for an action. Thread-safe."""
        if self._loop is None:
            self._wanted = True
            return
        with suppress(RuntimeError):  # the loop has ended together with the episode
            self._loop.call_soon_threadsafe(self._want)

    async def wait_for_snapshot(self) -> None:
        """Waits for the snapshot in progress, with a time limit. A cancellation of the wait cancels the snapshot."""
        capture = self._capture
        if capture is None:
            return
        started = time.perf_counter()
        try:
            await asyncio.wait({capture}, timeout=self._schedule.timeout_sec + UNWIND_SEC)
        except asyncio.CancelledError:
            await self._abandon_snapshot()
            raise
        finally:
            waited = time.perf_counter() - started
            self._waited_sec += waited
            self.grant_time(waited)
        if self._capture is capture:
            self._capture = None

    async def close(self) -> None:
        """Waits for the snapshot in progress, then closes the environment."""
        try:
            await self.wait_for_snapshot()
        finally:
            self._waits_for_action = False
            await super().close()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the snapshot in progress or, if the block was cancelled, cancels it. Closes the environment."""
        try:
            if isinstance(exc, asyncio.CancelledError | KeyboardInterrupt):
                await self._abandon_snapshot()
            else:
                await self.wait_for_snapshot()
        finally:
            self._waits_for_action = False
            await super().__aexit__(exc_type, exc, traceback)

    @property
    def _name(self) -> str:
        return f"{self._episode_id}@{self.step_count}"

    def _seen(self, time_step: TimeStep[Any]) -> TimeStep[Any]:
        """Starts a snapshot if one is due or requested. Returns `time_step` unchanged."""
        self._loop = asyncio.get_running_loop()
        self._waits_for_action = time_step.step_type != "LAST"
        if self._waits_for_action and (self._wanted or self._schedule.due(self.step_count)):
            self._start_snapshot()
        return time_step

    def _want(self) -> None:
        if not self._waits_for_action:
            self._wanted = True
        elif self._capture is None or self._capture.done():
            self._start_snapshot()

    def _start_snapshot(self) -> None:
        self._wanted = False
        if self._name not in self.snapshots:
            self._capture = asyncio.get_running_loop().create_task(self._take(self._name), name="snapshot")

    async def _take(self, name: str) -> None:
        timer = asyncio.timeout(self._schedule.timeout_sec)
        try:
            async with timer:
                await super().export_state(self._schedule.output_dir, snapshot_id=name)
        except asyncio.CancelledError:
            if self._is_there(name):  # the snapshot was complete before the cancellation
                self.snapshots.append(name)
            raise
        except Exception as error:  # no error of a snapshot ends the episode
            if not self._is_there(name):
                too_long = f"it was not taken within snapshot.timeout_sec={self._schedule.timeout_sec:g}"
                self._failed(f"Snapshot {name} failed", TimeoutError(too_long) if timer.expired() else error)
                return
        self.snapshots.append(name)
        await self._delete(self._schedule.surplus(self.snapshots))

    def _is_there(self, name: str) -> bool:
        return (self._schedule.output_dir / name).is_dir()

    async def _delete(self, names: list[str]) -> None:
        """Deletes some of the episode's snapshots. If a deletion fails, the snapshot stays in `snapshots`."""
        for name in list(names):
            self.snapshots.remove(name)
            try:
                await asyncio.to_thread(self._schedule.delete, name)
            except Exception as error:
                self.snapshots.insert(0, name)
                self._failed(f"Snapshot {name} could not be deleted", error)

    def _failed(self, what: str, error: Exception) -> None:
        self.snapshot_failures += 1
        self._schedule.report(what, error)

    async def _abandon_snapshot(self) -> None:
        """Cancels the snapshot in progress, and waits for its clean-up. An incomplete snapshot is not in the store."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.cancel()
            await finish(asyncio.wait({capture}, timeout=CANCEL_GRACE_SEC))
