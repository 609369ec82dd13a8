"""Work that several tasks of a process wait for and that is done once, in a thread, while anybody wants it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field


class NobodyWaits(Exception):
    """The last of those who waited for the work has gone."""


class Demand:
    """Whether anybody still wants a piece of work; the thread that does it asks from time to time."""

    def __init__(self) -> None:
        """Wanted, until `end`."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._release: Callable[[], None] | None = None

    def pause(self, seconds: float) -> None:
        """Waits, or notices that nobody waits any more; 0 only looks.

        Raises:
            NobodyWaits: The demand is over.
        """
        if self._over.wait(seconds):
            raise NobodyWaits

    @contextlib.contextmanager
    def releasing(self, release: Callable[[], None]) -> Iterator[None]:
        """Within, the end of the demand calls `release` (from another thread), which ends what the thread waits for."""
        with self._lock:
            self._release = release
            if self._over.is_set():
                release()
        try:
            yield
        finally:
            with self._lock:
                self._release = None

    def end(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._over.set()
            if self._release is not None:
                self._release()


@dataclass(slots=True, eq=False)
class _Shared:
    future: Future[None] = field(default_factory=Future)
    demand: Demand = field(default_factory=Demand)
    waiters: int = 0


_lock = threading.Lock()
_under_way: dict[str, _Shared] = {}


async def share(key: str, work: Callable[[Demand], None]) -> None:
    """Waits for `work`, which is started unless the same is under way already, on any event loop of this process.

    The thread never keeps the process alive. When the last waiter is cancelled, the work is told (`Demand`); whoever
    asks for it afterwards starts it anew.
    """
    key = f"{os.getpid()} {key}"
    with _lock:
        shared = _under_way.get(key)
        if shared is None:
            shared = _under_way[key] = _Shared()
            shared.future.set_running_or_notify_cancel()  # one waiter that is cancelled does not cancel the others
            threading.Thread(target=_run, args=(key, shared, work), name=f"work {key}", daemon=True).start()
        shared.waiters += 1
    try:
        await asyncio.wrap_future(shared.future)
    finally:
        with _lock:
            shared.waiters -= 1
            abandoned = shared.waiters == 0
            if abandoned:
                _forget(key, shared)
        if abandoned:
            shared.demand.end()


def _run(key: str, shared: _Shared, work: Callable[[Demand], None]) -> None:
    failure: BaseException | None = None
    try:
        work(shared.demand)
    except BaseException as error:
        failure = error
    with _lock:
        _forget(key, shared)
    if failure is not None:
        shared.future.set_exception(failure)
    else:
        shared.future.set_result(None)


def _forget(key: str, shared: _Shared) -> None:
    if _under_way.get(key) is shared:
        del _under_way[key]
