"""A helper process that outlives this process and, if this process dies, removes its resources from an engine.

A container that was created but not started does not end with our connection. Neither do the services of a compose
file. So the helper, a shell, reads a pipe that only this process holds, and that the kernel closes even after `kill
-9`. The shell then replaces itself with Python, which removes all resources whose labels name a dead owner. If the
helper is also killed (for example, the machine goes down), the next run cleans up.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time

from ares_exp.containers.docker.engine import Engine, connect_blocking
from ares_exp.containers.docker.leftovers import remove_stale
from ares_exp.containers.images.docker_cli import passed_on
from ares_exp.errors import PreflightError

APPEARS_WITHIN_SEC = 3.0
"""Seconds after the death of the process, or after the last removal, in which the engine may still execute requests."""

_WAIT = 'read -r _ || exec "$@"'
_POLL_SEC = 0.2
_END_SEC = 10.0

_lock = threading.Lock()
_reapers: dict[tuple[int, str], Reaper] = {}


def watch_over_us(engine: Engine) -> None:
    """Starts the helper for an engine, unless it is running. Call it before creating a resource. Blocking."""
    key = (os.getpid(), engine.host)
    with _lock:
        reaper = _reapers.get(key)
        if reaper is None or reaper.process.poll() is not None:
            _reapers[key] = Reaper(engine)


class Reaper:
    """The helper process that waits for the end of this process."""

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
        """Ends the helper without a removal, because this process ends normally. Idempotent."""
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
    """Removes the leftovers of dead processes on the engine, until no more appear."""
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
