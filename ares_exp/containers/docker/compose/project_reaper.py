"""A helper process that outlives ours and removes a compose project if ours ends without doing so.

The first process of our containers ends with our connection, but the other services of a compose file run the task's
programs. So a shell waits for the end of a pipe that only this process holds, which ends with it, also by kill -9. Then
the shell becomes Python and removes the project. If it is killed as well (a machine that goes down), the next run finds
the leftovers by their labels.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

from ares_exp.containers.docker.compose.removal import remove_project
from ares_exp.containers.docker.docker_cli import passed_on
from ares_exp.containers.docker.engine import Engine, connect
from ares_exp.errors import PreflightError

_WAIT = 'read -r _ || exec "$@"'
_END_SEC = 10.0


class ProjectReaper:
    """The helper process that waits for our end."""

    def __init__(self, engine: Engine, project: str) -> None:

        self._host = engine.host
        self._project = project
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process. Blocking, for milliseconds.

        Raises:
            OSError: It could not be started.
        """
        env = {**passed_on(), "DOCKER_HOST": self._host}
        env |= {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if name in os.environ}
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "sh", sys.executable, "-m", __name__, self._project],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # signals to our process group must not reach it
        )

    def dismiss(self) -> None:
        """Ends the process without a removal. Idempotent. Blocking, for milliseconds."""
        if self._process is None:
            return
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(b"\n")
            stdin.close()
        except OSError:
            pass  # it has been killed
        try:
            self._process.wait(_END_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _remove(projects: Sequence[str]) -> None:
    engine = await connect()
    for project in projects:
        await remove_project(engine, project, may_grow=True)


def main(projects: Sequence[str]) -> int:
    """Removes these projects."""
    try:
        asyncio.run(_remove(projects))
    except PreflightError:
        return 1  # the engine is gone: the next run finds them by their labels
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
