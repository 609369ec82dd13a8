"""Work, such as an image build, that runs once in a thread while several asyncio tasks wait for its result.

If the last waiting task is cancelled, the work ends early. A lock prevents other processes of the same user from doing
the same work at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.errors import ContainerStartError

_LOOK_EVERY_SEC = 0.05


class WorkAbandoned(Exception):
    """The work must end, because the last asyncio task that waited for it has been cancelled."""


class Demand:
    """The demand for the result of the work. It ends when no asyncio task waits for it. The thread polls it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._release: Callable[[], None] | None = None

    def pause(self, seconds: float) -> None:
        """Sleeps for `seconds` in the working thread. Raises `WorkAbandoned` as soon as the demand ends."""
        if self._over.wait(seconds):
            raise WorkAbandoned

    @contextlib.contextmanager
    def releasing(self, release: Callable[[], None]) -> Iterator[None]:
        """Calls `release` from another thread if the demand ends in the `with` block, to unblock the working thread."""
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
    """Runs `work` in a thread and waits for it. If work with the same key already runs in this process, only waits.

    Callers may run on different event loops. `work` gets a `Demand`, which ends when the last caller is cancelled.
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


@contextlib.contextmanager
def work_lock(name: str, demand: Demand) -> Iterator[None]:
    """Holds the lock `name` in the `with` block, so that one process of this user does the work at a time. Blocking.

    The kernel releases the lock if its holder dies. Raises `WorkAbandoned` if the demand ends before the lock is free,
    and `ContainerStartError` if the lock file cannot be used.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir()) / f"ares_exp-lock-{os.geteuid()}-{digest}"
    try:
        descriptor = _locked(path, demand)
    except OSError as error:
        raise ContainerStartError(f"The lock file {path} cannot be used: {error}. Remove it.") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # under the lock: no other process locks this file
        os.close(descriptor)


def _locked(path: Path, demand: Demand) -> int:
    """Opens and locks a file. Tries again if the previous holder of the lock has removed this file in the meantime."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            demand.pause(_LOOK_EVERY_SEC)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            os.close(descriptor)
