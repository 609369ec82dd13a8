"""One service of a compose project: commands in it, files out of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Unpack

from ares_exp.containers.container import ExecOptions, ExecResult
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.life import why_it_stays
from ares_exp.containers.docker.running import RunningContainer
from ares_exp.errors import ContainerError


class Service:
    """A `ServiceContainer`. Its shells are opened with its first command."""

    def __init__(self, engine: Engine, container: str, name: str) -> None:
        """Asks nobody yet.

        Args:
            engine: The engine.
            container: The name of its container.
            name: Its own.
        """
        self._engine = engine
        self._container = container
        self._name = name
        self._running = RunningContainer(engine, container, what=f"service {name}", shell="sh -c")
        self._is_open = False
        self._opening = asyncio.Lock()

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `ServiceContainer.exec`."""
        async with self._opening:
            if not self._is_open:
                try:
                    await self._running.open()
                except engine_errors() as error:
                    raise ContainerError(f"No command can be run in service {self._name}: {reason(error)}.") from error
                self._is_open = True
        return await self._running.exec(command, **options)

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `ServiceContainer.download`."""
        await self._running.download(source, target)

    async def stop(self) -> None:
        """As `ServiceContainer.stop`."""
        api = self._engine.api
        problem = await in_thread(lambda: why_it_stays(lambda: api.kill(self._container)), lane="removals")
        if problem and "is not running" not in problem:
            raise ContainerError(f"Service {self._name} could not be stopped: {problem}.")

    async def close(self) -> None:
        """Lets go of its shells. Idempotent; the service goes on."""
        await self._running.close()
