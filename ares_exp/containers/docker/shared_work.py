"""Work, such as an image build, that runs once in a thread while several asyncio tasks wait for its result.

If the last waiting task is cancelled, the work ends early. A lock prevents other processes of the same user from doing
the same work at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.containers.child_process import ChildProcess
from ares_exp.containers.ownership import locked
from ares_exp.errors import ContainerStartError

_LOOK_EVERY_SEC = 0.05


@dataclass(slots=True, eq=False)
class _Shared:
    future: Future[None] = field(default_factory=Future)
    child: ChildProcess = field(default_factory=ChildProcess)
    waiters: int = 0


_lock = threading.Lock()
_in_progress: dict[str, _Shared] = {}


async def share(key: str, work: Callable[[ChildProcess], None]) -> None:
    """Runs `work` in a thread and waits for it. If work with the same key already runs in this process, only waits.

    Callers may run on different event loops. `work` must run its programs with the given `ChildProcess`, which is
    stopped when the last caller is cancelled.
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
            shared.child.stop()


def _run(key: str, shared: _Shared, work: Callable[[ChildProcess], None]) -> None:
    failure: BaseException | None = None
    try:
        work(shared.child)
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
def work_lock(name: str, child: ChildProcess) -> Iterator[None]:
    """Holds the lock `name` in the `with` block, so that one process of this user does the work at a time. Blocking.

    The kernel releases the lock if its holder dies. Raises `ChildFailedError` if `child` is stopped before the lock is
    free, and `ContainerStartError` if the lock file cannot be used.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir()) / f"ares_exp-lock-{os.geteuid()}-{digest}"
    with contextlib.ExitStack() as stack:
        is_ours = False
        while not is_ours:
            try:
                descriptor = stack.enter_context(locked(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
                is_ours = os.fstat(descriptor).st_nlink > 0  # otherwise, the previous holder has removed this file
            except BlockingIOError:
                child.pause(_LOOK_EVERY_SEC)
            except OSError as error:
                raise ContainerStartError(f"The lock file {path} cannot be used: {error}. Remove it.") from error
        stack.callback(path.unlink, missing_ok=True)  # under the lock: no other process locks this file
        yield
