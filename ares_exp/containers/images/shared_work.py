"""Work done once, in a thread, for several waiting tasks of a process, until the last one is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field


class WorkAbandoned(Exception):
    """The last waiter for the work has been cancelled."""


class Demand:
    """The demand for a piece of work; the working thread polls it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._release: Callable[[], None] | None = None

    def pause(self, seconds: float) -> None:
        """Sleeps, and raises as soon as the demand ends; 0 only checks.

        Raises:
            WorkAbandoned: The demand is over.
        """
        if self._over.wait(seconds):
            raise WorkAbandoned

    @contextlib.contextmanager
    def releasing(self, release: Callable[[], None]) -> Iterator[None]:
        """Within it, the end of the demand calls `release` (from another thread) to unblock the working thread."""
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
_in_progress: dict[str, _Shared] = {}


async def share(key: str, work: Callable[[Demand], None]) -> None:
    """Waits for `work`, started unless work of the same key is running, on any event loop of this process.

    The thread does not keep the process alive. When the last waiter is cancelled, the work's `Demand` ends; a later
    call starts it again.
    """
    key = f"{os.getpid()} {key}"
    with _lock:
        shared = _in_progress.get(key)
        if shared is None:
            shared = _in_progress[key] = _Shared()
            shared.future.set_running_or_notify_cancel()  # a cancelled waiter does not cancel the others
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
    if _in_progress.get(key) is shared:
        del _in_progress[key]
