"""The lifetime of a Docker container: it ends with the process that started it, and is removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ares_exp.containers.docker.engine import Engine, EngineError, engine_errors, reason
from ares_exp.containers.docker.stream import EngineStream

FIRST_COMMAND = ["sh", "-c", "while read -r _; do jobs; done"]
"""The first process of a container: it ends with its stdin, which ends with our connection, however we end.

As process 1 it ignores signals from inside (`kill -9 -1`, `pkill sh`). It also reaps orphaned processes: `jobs` makes a
shell do that, without a fork that could fail, each time it reads a line.
"""

NAME_PREFIX = "ares-exp-"
"""Name prefix of our containers. Labels alone do not identify them: `docker commit` copies labels."""

REMOVAL_SEC = 12.0
"""Bound on the removal of a container, which takes milliseconds, or seconds under load."""

_REAP_EVERY_SEC = 1.0
_KEPT_BYTES = 4096
_logger = logging.getLogger(__name__)


class FirstProcess:
    """The stdin of a container's first process, held open, and the end of its output."""

    def __init__(self, stream: EngineStream) -> None:

        self._stream = stream
        self._output = b""
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def attach(cls, engine: Engine, container: str) -> FirstProcess:
        """Attaches to a container that has been created but not started, before its first output.

        Raises:
            EngineError: The engine refused.
            OSError: The engine is gone.
        """
        connection = await engine.hijack(f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1", {})
        return cls(EngineStream(*connection, with_stderr=True))

    async def _listen(self) -> None:
        reaper = asyncio.create_task(self._reap())
        try:
            while data := await self._stream.read():
                self._output = (self._output + data)[-_KEPT_BYTES:]
        except OSError:
            pass  # as at the end: the engine closed the connection
        finally:
            reaper.cancel()

    async def _reap(self) -> None:
        """Feeds lines, so that zombies are reaped: else a process that waits for one it killed would see it forever."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(_REAP_EVERY_SEC)
                await self._stream.write(b"\n")

    async def ended(self) -> None:
        """Waits for the end of the process."""
        await asyncio.wait({self._listener})

    def last_output(self) -> str:
        """Returns a sentence with the end of its output; empty without output."""
        text = self._output.decode("utf-8", "replace").strip()
        return f" Its first process (the image's ENTRYPOINT, if it has one) last printed:\n{text}" if text else ""

    def close(self) -> None:
        """Closes stdin, which ends a container that still runs."""
        self._listener.cancel()
        self._stream.close()


def remove(engine: Engine, container: str, image: str | None = None) -> None:
    """Kills and removes a container, and an otherwise unused image. Blocking; missing ones are no error."""
    if problem := why_it_stays(lambda: _remove_container(engine, container)):
        _logger.warning("The container %s could not be removed: %s.", container, problem)
    elif image is not None and (problem := why_it_stays(lambda: engine.api.remove_image(image))):
        _logger.info("The image %s stays: %s.", image, problem)


def _remove_container(engine: Engine, container: str) -> None:
    """Requests the removal; a hanging engine completes it once it continues."""
    path = f"{engine.api.base_url}/v{engine.api.api_version}/containers/{container}"
    answer = engine.api.delete(path, params={"force": "1", "v": "1"}, timeout=REMOVAL_SEC)
    if not answer.ok:
        raise EngineError(answer.text.strip(), answer.status_code)


def why_it_stays(removal: Callable[[], object]) -> str:
    """Runs a removal and returns why the thing remains; `""` when it is gone, or about to be. Blocking."""
    try:
        removal()
    except engine_errors() as error:
        status = error.status if isinstance(error, EngineError) else getattr(error, "status_code", 0)
        if status != 404 and not (status == 409 and "already in progress" in str(error)):
            return reason(error)
    return ""
