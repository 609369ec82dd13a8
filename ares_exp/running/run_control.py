"""Control of a run by files: its state is written, orders are read, obeyed and recorded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ares_exp.cancellation import finish
from ares_exp.control.inbox import Inbox, Refused, TakenOrder
from ares_exp.control.orders import Order, record
from ares_exp.control.status import RunStatus, State, write_status
from ares_exp.control.stop_file import STOP, is_stopped
from ares_exp.errors import UserError
from ares_exp.records.run_dir import RunDir, append_lines
from ares_exp.terminal.terminal import count_of, one_line

LOOK_SEC = 1.0
"""Seconds between two looks at the inbox."""
TOLD_SEC = 2.0
"""Seconds between two states while somebody looks at them."""
UNWIND_SEC = 2.0
SHOWN = 3
MAX_ROUNDS = 100

logger = logging.getLogger(__name__)


class Obeying(Protocol):
    """What orders are given to."""

    def obey(self, order: Order) -> Awaitable[str]:
        """Does what is asked, and returns the outcome in a sentence.

        Raises:
            UserError: It cannot be done; nothing has changed.
        """
        ...


class Telling(Protocol):
    """What tells the state of the run."""

    @property
    def state(self) -> State:
        """How far it is."""
        ...

    def look(self) -> RunStatus:
        """Returns all of it; called in a thread."""
        ...


@dataclass(kw_only=True)
class RunControl:
    """Takes orders and tells the state while its body runs: `async with RunControl(…):`.

    Attributes:
        run_dir: The run directory.
        sweep_dir: The sweep's, whose orders are for all its jobs.
        orders: Obeys them.
        live: Tells the state.
        note: Gets every line of the record.
        interval_sec: Seconds between two states while nobody looks.
        is_recorded: Whether the run can write its records. If not, the run has reported why.
    """

    run_dir: RunDir
    orders: Obeying
    live: Telling
    note: Callable[[Mapping[str, Any]], None]
    sweep_dir: Path | None = None
    interval_sec: float = 10.0
    is_recorded: Callable[[], bool] = lambda: True
    _own: Inbox = field(init=False)
    _shared: Inbox | None = field(init=False, default=None)
    _task: asyncio.Task[None] | None = field(init=False, default=None)
    _obeying: dict[asyncio.Task[None], TakenOrder] = field(init=False, default_factory=dict)
    _told_at: float = field(init=False, default=0.0)
    _told: State | None = field(init=False, default=None)
    _is_stopped: bool = field(init=False, default=False)
    _has_failed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._own = Inbox(self.run_dir.control)
        if self.sweep_dir is not None:
            self._shared = Inbox(self.sweep_dir / self.run_dir.control.name, is_shared=True)

    async def __aenter__(self) -> Self:
        """Refuses what was ordered earlier, obeys what all jobs of the sweep do, and begins to look."""
        await self._refuse_all("it was given before this session of the run began")
        await self._look()
        await self._tell()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Refuses what was ordered too late, and tells the last state."""
        assert self._task is not None
        self._task.cancel()
        await finish(self._end(self._task))

    async def _end(self, watching: asyncio.Task[None]) -> None:
        for task in self._obeying:
            task.cancel()
        await asyncio.wait({watching, *self._obeying}, timeout=UNWIND_SEC)
        await self._refuse_all("the run has ended")
        await self._tell()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SEC)
            is_due = await self._look() or self.live.state != self._told
            if is_due or time.monotonic() - self._told_at >= await self._pace():
                await self._tell()

    async def _pace(self) -> float:
        is_looked_at = await asyncio.to_thread(lambda: self._own.is_looked_at)
        return (min(TOLD_SEC, self.interval_sec) if is_looked_at else self.interval_sec) - LOOK_SEC / 2

    async def _look(self) -> bool:
        """Obeys what is new; returns whether anything was."""
        taken, is_stopped = await asyncio.to_thread(self._take)
        found = [one for one in taken if isinstance(one, TakenOrder)]
        if is_stopped and not self._is_stopped:
            self._is_stopped = True
            found.append(TakenOrder(replace(Order.made("stop"), by=f"the file {STOP} of the sweep"), None))
        await self._refuse([one for one in taken if isinstance(one, Refused)])
        for one in found:
            task = asyncio.create_task(self._obey(one))
            self._obeying[task] = one
            task.add_done_callback(self._obeying.pop)
            await asyncio.wait({task}, timeout=LOOK_SEC)  # one after the other, but none holds the others up for long
        return bool(taken or found)

    def _take(self) -> tuple[list[TakenOrder | Refused], bool]:
        taken = self._own.take()
        if self._shared is not None:
            taken += self._shared.take()
        return taken, self.sweep_dir is not None and is_stopped(self.sweep_dir)

    async def _obey(self, taken: TakenOrder) -> None:
        order = taken.order
        why = f", because: {one_line(order.reason)}" if order.reason else ""
        logger.warning("Ordered by %s: %s%s.", one_line(order.by), in_words(order), why)
        try:
            outcome, says = "done", await self.orders.obey(order)
        except UserError as error:
            outcome, says = "refused", str(error)
        except asyncio.CancelledError:
            outcome, says = "failed", "the run has ended meanwhile"
        except Exception as error:
            outcome, says = "failed", f"{type(error).__name__}: {error}"
        if outcome != "done":
            logger.warning("That order was %s: %s", outcome, one_line(says, 300))
        await self._note(record(order, outcome, says, uid=taken.uid, at=time.time()))

    async def _refuse(self, found: Sequence[Refused]) -> None:
        if not found:
            return
        named = "; ".join(f"{one_line(one.name, 60)} ({one_line(one.why)})" for one in found[:SHOWN])
        more = f"; and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
        says = f"{count_of(len(found), 'file')} in {self.run_dir.control.name}/ without an order: {named}{more}."
        logger.warning("%s", says)
        await self._note({"verb": None, "outcome": "refused", "says": says, "settled_at": time.time()})

    async def _refuse_all(self, why: str) -> None:
        """Refuses what lies in the run's own inbox."""
        for _ in range(MAX_ROUNDS):  # somebody may go on writing
            if not (taken := await asyncio.to_thread(self._own.take)):
                return
            await self._refuse([one for one in taken if isinstance(one, Refused)])
            for one in taken:
                if isinstance(one, TakenOrder):
                    await self._note(record(one.order, "refused", why, uid=one.uid, at=time.time()))

    async def _note(self, line: Mapping[str, Any]) -> None:
        self.note(line)
        await finish(self._on_disk(lambda: append_lines(self.run_dir.orders, line)))

    async def _tell(self) -> None:
        self._told, self._told_at = self.live.state, time.monotonic()
        await self._on_disk(lambda: write_status(self.run_dir.status, self.live.look()))

    async def _on_disk(self, write: Callable[[], None]) -> None:
        """Writes in a thread. Where that fails the run goes on, with one warning."""
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            level = logging.DEBUG if self._has_failed or not self.is_recorded() else logging.WARNING
            self._has_failed = True
            logger.log(level, "The state of the run cannot be written: %s: %s", error.filename, error.strerror)


def in_words(order: Order) -> str:
    """Returns what an order asks, in one line."""
    words: list[str] = [order.verb]
    words += [one_line(order.what)] if order.what is not None else []
    words += [one_line(f"{key}={value}") for key, value in order.values.items()]
    words += ["--now"] if order.now else []
    words += [f"--for {order.for_sec:g}s"] if order.for_sec is not None else []
    words += ["--verify"] if order.verify else []
    return " ".join(words)
