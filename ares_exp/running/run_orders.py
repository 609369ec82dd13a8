"""Orders to a run, obeyed: what each changes in the parts of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ares_exp.asking.gate import Gate
from ares_exp.control.orders import Order
from ares_exp.control.status import Held
from ares_exp.errors import ConfigError
from ares_exp.running.live_status import LiveStatus
from ares_exp.running.scheduler import Scheduler
from ares_exp.terminal.terminal import count_of, format_duration


@dataclass(kw_only=True)
class RunOrders:
    """What orders are given to.

    Attributes:
        scheduler: Plays the episodes.
        gate: Before the policy.
        live: Tells the state.
        interrupt: Ends the run, as Ctrl-C does.
    """

    scheduler: Scheduler
    gate: Gate
    live: LiveStatus
    interrupt: Callable[[], None]
    _resuming: asyncio.TimerHandle | None = field(init=False, default=None)

    async def obey(self, order: Order) -> str:
        """Does what is asked, and returns in a sentence what came of it.

        Raises:
            UserError: It cannot be done; nothing has changed.
        """
        acts: dict[str, Callable[[Order], Awaitable[str]]] = {
            "pause": self._pause,
            "resume": self._resume,
            "stop": self._stop,
        }
        if order.verb not in acts:
            raise ConfigError(f"There is no order {order.verb} in this version.")
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

    def _end_pause(self) -> None:
        self._forget_timer()
        self.live.held = None
        self.gate.open()
        self.scheduler.resume()

    def _forget_timer(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
