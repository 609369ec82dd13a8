"""Doors of a Docker container: sockets made inside its network where that can be, as for the egress proxy."""

from __future__ import annotations

import functools
import socket

from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.network import namespace_obstacle
from ares_exp.containers.docker.running import RunningContainer
from ares_exp.containers.door import Door, OpenDoors, Serve
from ares_exp.containers.listening_door import listen_at_free_port, open_listening_door
from ares_exp.containers.network_namespace import listen_inside
from ares_exp.errors import DoorUnavailableError


class ContainerDoors:
    """The doors of one container, which are closed with it."""

    def __init__(self) -> None:
        """There is none yet."""
        self._open = OpenDoors()

    async def open(self, engine: Engine, container: str, running: RunningContainer, serve: Serve, port: int) -> Door:
        """As `ServingContainer.open_door`.

        Args:
            engine: The engine.
            container: The container's name.
            running: The same container.
            serve: As there.
            port: As there.

        Raises:
            DoorUnavailableError: As there.
            ContainerDiedError: The container is gone.
        """
        running.raise_if_closed()
        failures: tuple[type[Exception], ...] = (DoorUnavailableError, *engine_errors())
        try:
            if why := await in_thread(namespace_obstacle):
                raise DoorUnavailableError(f"No socket can be made inside the container's network: {why}.")
            found = await in_thread(lambda: engine.api.inspect_container(container), abandon=True)
            listen = functools.partial(_listen, found["State"]["Pid"], found["Id"], port)
            return await self._open.add(await open_listening_door(listen, serve))
        except failures as error:
            await running.raise_if_dead(error)
            if isinstance(error, DoorUnavailableError):
                raise
            raise DoorUnavailableError(f"The engine does not open a door: {reason(error)}.") from error

    async def close(self) -> None:
        """Closes all of them. Idempotent."""
        await self._open.close()


def _listen(pid: int, container_id: str, port: int) -> socket.socket:
    return listen_at_free_port(lambda address: listen_inside(pid, container_id, address), port)
