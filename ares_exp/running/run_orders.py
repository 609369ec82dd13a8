"""The effects of orders on the parts of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ares_exp.asking.gate import Gate
from ares_exp.control.orders import SNAPSHOT_TAKEN, Order
from ares_exp.control.status import Held
from ares_exp.errors import ConfigError
from ares_exp.resume.episode_plan import PlannedEpisode
from ares_exp.running.live_settings import LiveSettings
from ares_exp.running.live_status import LiveStatus
from ares_exp.running.running_episode import RunningEpisode
from ares_exp.running.scheduler import Scheduler
from ares_exp.snapshots.snapshotting_environment import SnapshottingEnvironment
from ares_exp.terminal.terminal import count_of, format_duration

WAIT_SEC = 600.0
"""How long a snapshot may take to begin: the episode has to wait for the policy."""
POLL_SEC = 0.1
SHOWN = 10


@dataclass(kw_only=True)
class RunOrders:
    """What orders are given to.

    Attributes:
        scheduler: Plays the episodes.
        gate: Before the policy.
        live: Tells the state.
        interrupt: Ends the run, as Ctrl-C does.
        running: Returns the episodes under way.
        settings: What can be set.
        dropped: Is told of each try that is taken off the queue.
        again: Plans further tries of a task's failed attempts, or of an episode's.
        snapshot_sec: Bound on one snapshot.
    """

    scheduler: Scheduler
    gate: Gate
    live: LiveStatus
    interrupt: Callable[[], None]
    running: Callable[[], Sequence[RunningEpisode]]
    settings: LiveSettings
    dropped: Callable[[PlannedEpisode], None]
    again: Callable[[str], Awaitable[Sequence[PlannedEpisode]]]
    snapshot_sec: float = 300.0
    _resuming: asyncio.TimerHandle | None = field(init=False, default=None)

    async def obey(self, order: Order) -> str:
        """Does what is asked, and returns the outcome in a sentence.

        Raises:
            UserError: It cannot be done; nothing has changed.
        """
        acts: dict[str, Callable[[Order], Awaitable[str]]] = {
            "pause": self._pause,
            "resume": self._resume,
            "stop": self._stop,
            "set": self._set,
            "cancel": self._cancel,
            "retry": self._retry,
            "snapshot": self._snapshot,
        }
        return await acts[order.verb](order)

    async def _pause(self, order: Order) -> str:
        now = time.time()
        until = min(now, order.at) + order.for_sec if order.for_sec is not None else None
        if until is not None and until <= now:
            return "The pause is over already."
        self._forget_timer()
        self.scheduler.pause()
        (self.gate.close if order.now else self.gate.open)()
        since = self.live.held.since if self.live.held is not None else now
        self.live.held = Held(since, order.now, until, order.by, order.reason)
        if until is not None:
            self._resuming = asyncio.get_running_loop().call_later(until - now, self._end_pause)
        going_on = count_of(self.live.look().running, "episode")
        how = f"{going_on} under way held at the next request" if order.now else f"{going_on} under way played on"
        return f"Nothing new begins; {how}."

    async def _resume(self, order: Order) -> str:
        held = self.live.held
        if held is None:
            return "It was not paused."
        self._end_pause()
        return f"Resumed after {format_duration(time.time() - held.since)}."

    async def _stop(self, order: Order) -> str:
        self.interrupt()
        return "Episodes under way are ended as cancelled; the run can be resumed."

    async def _set(self, order: Order) -> str:
        self.settings.set(order.values)
        return f"In force: {', '.join(f'{key}={_shown(value)}' for key, value in order.values.items())}."

    async def _cancel(self, order: Order) -> str:
        what = str(order.what)
        dropped = self.scheduler.drop(lambda one: what in (one.episode_id, one.task_name))
        for one in dropped:
            self.dropped(one)
        found = [one for one in self.running() if what in (one.planned.episode_id, one.planned.task_name)]
        if not found and not dropped:
            raise ConfigError(f"There is no episode under way or queued of {what}. {self._under_way()}")
        for episode in found:
            if order.verify:
                episode.cut_short()
            else:
                episode.is_cancelled = True
                self.scheduler.cancel(episode.planned.episode_id)
        how = "ended and scored on what there is" if order.verify else "cancelled"
        queued = f", and {count_of(len(dropped), 'attempt')} taken off the queue" if dropped else ""
        return f"{count_of(len(found), 'episode')} {how}{queued}; `resume=` plays what has no reward."

    async def _retry(self, order: Order) -> str:
        planned = await self.again(str(order.what))
        for one in reversed(planned):
            self.scheduler.add(one)
        reused = sum(one.earlier is not None for one in planned)
        return f"{count_of(len(planned), 'attempt')} next in the queue, {reused} with recorded answers."

    async def _snapshot(self, order: Order) -> str:
        episode = next((one for one in self.running() if one.planned.episode_id == order.what), None)
        if episode is None:
            raise ConfigError(f"There is no episode {order.what} under way. {self._under_way()}")
        environment = episode.environment
        if not isinstance(environment, SnapshottingEnvironment):
            raise ConfigError("This run takes no snapshots; `snapshot=manual` lets it take those that are asked for.")
        known, failures = list(environment.snapshots), environment.snapshot_failures
        environment.request_snapshot()
        async with asyncio.timeout(self.snapshot_sec + WAIT_SEC):
            while episode.result is None and environment.snapshot_failures == failures:
                if new := [name for name in environment.snapshots if name not in known]:
                    return SNAPSHOT_TAKEN.format(new[-1])
                if environment.has_current_snapshot:
                    return SNAPSHOT_TAKEN.format(environment.snapshots[-1])
                await asyncio.sleep(POLL_SEC)
        raise ConfigError("The snapshot failed, or the episode ended before; the log of the run says more.")

    def _under_way(self) -> str:
        names = [one.planned.episode_id for one in self.running()]
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        return f"Under way: {', '.join(names[:SHOWN]) or 'none'}{more}."

    def _end_pause(self) -> None:
        self._forget_timer()
        self.live.held = None
        self.gate.open()
        self.scheduler.resume()

    def _forget_timer(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
