"""Life and death of a Docker container: the dead-man's switch, whose it is, why it ended, how it goes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import uuid
from pathlib import Path

from ares_exp.containers.docker.engine import Engine, engine_errors, reason
from ares_exp.containers.docker.stream import EngineStream

FIRST_COMMAND = ["sh", "-c", "while read -r _; do jobs; done"]
"""What keeps a container alive: it ends with its stdin, which ends with our connection, however we end.

As process 1 no signal from inside ends it (`kill -9 -1`, `pkill sh`). It also has to reap what commands orphan: `jobs`
makes a shell do that, without a fork that could fail, each time it reads a line.
"""

_REAP_EVERY_SEC = 1.0
_KEPT_BYTES = 4096
_logger = logging.getLogger(__name__)


class FirstProcess:
    """The held stdin of a container's first process, and the end of what that process printed."""

    def __init__(self, stream: EngineStream) -> None:
        """Takes over the stream and reads it from now on."""
        self._stream = stream
        self._output = b""
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def attach(cls, engine: Engine, container: str) -> FirstProcess:
        """Attaches to a container that has been created and not started: earlier than its first word.

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
            pass  # as at the end: the engine let go
        finally:
            reaper.cancel()

    async def _reap(self) -> None:
        """Feeds lines: a process that waits for one that it killed would otherwise see a zombie for ever."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(_REAP_EVERY_SEC)
                await self._stream.write(b"\n")

    def epitaph(self) -> str:
        """A sentence with what it last printed; empty when it printed nothing."""
        text = self._output.decode("utf-8", "replace").strip()
        return f" Its first process (the image's ENTRYPOINT, if it has one) last printed:\n{text}" if text else ""

    def close(self) -> None:
        """Lets go of stdin: a container that still lives ends by this."""
        self._listener.cancel()
        self._stream.close()


def cause_of_death(engine: Engine, container: str) -> str | None:
    """Why a container runs no more, to follow "The container "; `None` when it runs. Blocking."""
    from docker.errors import NotFound

    try:
        state = engine.api.inspect_container(container)["State"]
    except NotFound:
        return "is gone: its first process ended, or somebody removed it"
    except engine_errors() as error:
        return f"is out of reach: the engine at {engine.host} does not answer ({reason(error)})"
    if state["Running"]:
        return None
    killed = ", killed for using more memory than its limit (memory_mb)" if state["OOMKilled"] else ""
    return f"ended with exit code {state['ExitCode']}{killed}"


def remove(engine: Engine, container: str, image: str | None = None) -> None:
    """Kills and removes a container, and an image that nobody else uses. Blocking; what is gone already is fine."""
    from docker.errors import APIError, NotFound

    try:
        engine.api.remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except engine_errors() as error:
        if not (isinstance(error, APIError) and error.status_code == 409):  # 409: it is being removed
            _logger.warning("The container %s could not be removed: %s.", container, reason(error))
    if image is not None:
        try:
            engine.api.remove_image(image)
        except engine_errors() as error:
            _logger.info("The image %s stays: %s.", image, reason(error))


def owner_labels() -> dict[str, str]:
    """Labels that tell whose a container is, for whoever cleans up after a dead process."""
    return {
        "ares_exp.run": _run_id(os.getpid()),
        "ares_exp.host": socket.gethostname(),
        "ares_exp.pid": str(os.getpid()),
        "ares_exp.process-start": _process_start(),
    }


@functools.lru_cache(maxsize=1)
def _run_id(pid: int) -> str:
    return uuid.uuid4().hex


def _process_start() -> str:
    """Start of this process in clock ticks since boot, which tells it from a later one of the same pid."""
    try:
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
