"""Doors of a Docker container: sockets made inside its network, or relays where none can be."""

from __future__ import annotations

import functools
import logging
import socket

from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.network import namespace_obstacle
from ares_exp.containers.docker.running import RunningContainer
from ares_exp.containers.door import Door, OpenDoors, Serve
from ares_exp.containers.listening_door import listen_at_free_port, open_listening_door
from ares_exp.containers.network_namespace import listen_inside
from ares_exp.containers.relay_door import open_relay_door
from ares_exp.errors import ContainerError, DoorUnavailableError

_REMEDY = ", or run as root on the engine's machine, which needs nothing in the image"
_logger = logging.getLogger(__name__)


class ContainerDoors:
    """The doors of one container, which are closed with it."""

    def __init__(self) -> None:
        self._open = OpenDoors()

    async def open(self, engine: Engine, container: str, running: RunningContainer, serve: Serve, port: int) -> Door:
        running.raise_if_closed()
        failures: tuple[type[Exception], ...] = (ContainerError, *engine_errors())
        try:
            return await self._open.open(lambda: self._made(engine, container, running, serve, port))
        except failures as error:
            await running.raise_if_dead(error)
            if isinstance(error, DoorUnavailableError):
                raise
            raise DoorUnavailableError(f"No door can be opened in the container: {reason(error)}.") from error

    async def _made(self, engine: Engine, container: str, running: RunningContainer, serve: Serve, port: int) -> Door:
        door = await self._listening(engine, container, serve, port)
        if door is None:
            door = await open_relay_door(lambda: running.open_shell("0"), serve, port, remedy=_REMEDY)
        return door

    async def _listening(self, engine: Engine, container: str, serve: Serve, port: int) -> Door | None:
        """Opens a door inside the container's network; `None` where that cannot be."""
        why = await in_thread(lambda: namespace_obstacle(engine.host))
        if why is None:
            found = await in_thread(lambda: engine.api.inspect_container(container), abandon=True)
            listen = functools.partial(_listen, found["State"]["Pid"], found["Id"], port)
            try:
                return await open_listening_door(listen, serve)
            except OSError as error:
                why = str(error)
        _logger.info("A door of %s is a relay: %s.", container, why)
        return None

    async def close(self) -> None:
        await self._open.close()


def _listen(pid: int, container_id: str, port: int) -> socket.socket:
    return listen_at_free_port(lambda address: listen_inside(pid, container_id, address), port)
