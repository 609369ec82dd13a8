"""The scheduler: a limited number of episodes at once; retries wait outside of a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ares_exp.resume.episode_plan import PlannedEpisode

INTERRUPT_GRACE_SEC = 4.5
"""Seconds that interrupted episodes have to clean up before the run ends without them."""


class Retry(NamedTuple):
    """A retry of an attempt, and the time when it is due."""

    planned: PlannedEpisode
    wait_sec: float


Play = Callable[[PlannedEpisode], Awaitable[Retry | None]]


class Scheduler:
    """Plays episodes until all attempts have their results, or until the interrupt."""

    def __init__(self, concurrency: int, play: Play) -> None:
        """Keeps the arguments.

        Args:
            concurrency: Maximum number of episodes at once.
            play: Plays one and returns a retry, if one is due. It raises only errors that are to end the run.
        """
        self._concurrency = concurrency
        self._play = play
        self._ready: asyncio.Queue[PlannedEpisode | None] = asyncio.Queue()
        self._owed = 0
        self._workers: list[asyncio.Task[None]] = []
        self._interrupt = asyncio.Event()
        self._waiting: set[asyncio.TimerHandle] = set()

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called."""
        return self._interrupt.is_set()

    @property
    def queued(self) -> int:
        """Number of tries that wait for a slot, or for their time."""
        return self._ready.qsize() + len(self._waiting)

    def interrupt(self) -> None:
        """Ends running episodes as cancelled and starts no more."""
        self._interrupt.set()
        for worker in self._workers:
            worker.cancel()

    def add(self, planned: PlannedEpisode) -> None:
        """Has one more played, while `run` waits for more."""
        self._owed += 1
        self._ready.put_nowait(planned)

    def end(self) -> None:
        """Says that nothing more is added: `run` returns when all have their results."""
        self._settle()

    async def run(self, owed: Sequence[PlannedEpisode], *, waits_for_more: bool = False) -> None:
        """Plays all of them. After an interrupt returns early, at most `INTERRUPT_GRACE_SEC` later.

        Args:
            owed: What is to be played.
            waits_for_more: Whether it goes on with what `add` brings, until `end`.

        Raises:
            Exception: What `play` raised.
        """
        if self.interrupted or not (owed or waits_for_more):
            return
        self._owed = len(owed) + waits_for_more
        for planned in owed:
            self._ready.put_nowait(planned)
        workers = self._concurrency if waits_for_more else min(self._concurrency, len(owed))
        self._workers = [asyncio.create_task(self._work()) for _ in range(workers)]
        interrupt = asyncio.create_task(self._interrupt.wait())
        pending: set[asyncio.Task[Any]] = {*self._workers}
        try:
            while pending and not self.interrupted:
                done, _ = await asyncio.wait({*pending, interrupt}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                for worker in done - {interrupt}:
                    if not (worker.cancelled() and self.interrupted):  # the interrupt ends the workers so
                        worker.result()
            if pending:
                await asyncio.wait(pending, timeout=INTERRUPT_GRACE_SEC)
        finally:
            interrupt.cancel()
            for timer in self._waiting:
                timer.cancel()
            for worker in self._workers:
                worker.cancel()
            if unfinished := [worker for worker in self._workers if not worker.done() and not self.interrupted]:
                await asyncio.wait(unfinished, timeout=INTERRUPT_GRACE_SEC)

    async def _work(self) -> None:
        while not self.interrupted and (planned := await self._ready.get()) is not None:
            retry = await self._play(planned)
            if retry is None:
                self._settle()
            else:
                self._wait(retry)

    def _settle(self) -> None:
        """Counts an attempt as finished; after the last one, stops the workers."""
        self._owed -= 1
        if self._owed == 0:
            for _ in self._workers:
                self._ready.put_nowait(None)

    def _wait(self, retry: Retry) -> None:
        def ready() -> None:
            self._waiting.discard(timer)
            self._ready.put_nowait(retry.planned)

        timer = asyncio.get_running_loop().call_later(retry.wait_sec, ready)
        self._waiting.add(timer)
