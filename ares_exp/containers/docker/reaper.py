"""A helper process that removes this process's resources from an engine after this process has died.

It is needed for resources that remain when our connection closes, such as the services of a compose file and containers
that were created but not started. The helper is a shell that waits on a pipe from this process. When this process dies,
even by `kill -9`, the kernel closes the pipe. The shell then starts Python, which removes all resources whose labels
name a dead owner. If the helper also dies, for example because the machine goes down, the next run cleans up.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time

from ares_exp.containers.docker.docker_cli import passed_on
from ares_exp.containers.docker.engine import Engine, connect_blocking
from ares_exp.containers.docker.leftovers import remove_stale
from ares_exp.errors import PreflightError

APPEARS_WITHIN_SEC = 3.0
"""Seconds in which resources may still appear after the process died, because the engine still handles its requests."""

_WAIT = 'read -r _ || exec "$@"'
_POLL_SEC = 0.2
_END_SEC = 10.0

_lock = threading.Lock()
_reapers: dict[tuple[int, str], Reaper] = {}


def watch_over_us(engine: Engine) -> None:
    """Starts the helper for an engine, unless it already runs. Call this before you create a resource. Blocking."""
    key = (os.getpid(), engine.host)
    with _lock:
        reaper = _reapers.get(key)
        if reaper is None or reaper.process.poll() is not None:
            _reapers[key] = Reaper(engine)


class Reaper:
    """The helper process for one engine, which waits until this process ends."""

    def __init__(self, engine: Engine) -> None:
        env = {**passed_on(), "DOCKER_HOST": engine.host}
        env |= {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if name in os.environ}
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "sh", sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd="/",
            start_new_session=True,  # signals to our process group must not reach it
        )
        atexit.register(self.dismiss)

    def dismiss(self) -> None:
        """Ends the helper without removing anything, because this process ends normally. Idempotent."""
        stdin = self.process.stdin
        assert stdin is not None
        if os.getpid() != self._owner or stdin.closed:
            return
        try:
            stdin.write(b"\n")
            stdin.close()
        except OSError:
            pass  # it has been killed
        try:
            self.process.wait(_END_SEC)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> int:
    """Removes the resources of dead processes from the engine, until no more appear. The helper runs this function."""
    try:
        engine = connect_blocking()
    except PreflightError:
        return 1  # the engine is gone: the next run finds everything by its labels
    until = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < until:
        if remove_stale(engine):
            until = time.monotonic() + APPEARS_WITHIN_SEC
        time.sleep(_POLL_SEC)
    return 0


if __name__ == "__main__":
    sys.exit(main())
