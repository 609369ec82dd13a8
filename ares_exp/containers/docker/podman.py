"""The factory of `container=podman`: Podman answers requests as a Docker engine does, at a socket of its own."""

from __future__ import annotations

import os

from ares_exp.containers.docker.engine import PODMAN_SOCKET
from ares_exp.containers.docker.factory import DockerContainerFactory


class PodmanContainerFactory(DockerContainerFactory):
    """Makes containers of Podman's service, the system's for root and the user's own for others.

    Everything is as with `container=docker`, but for the address: `CONTAINER_HOST`, else the socket.
    """

    name = "podman"

    @classmethod
    def default_host(cls) -> str:
        """Returns the address of the service."""
        runtime = "/run" if os.getuid() == 0 else os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
        return os.environ.get("CONTAINER_HOST") or f"unix://{runtime}{PODMAN_SOCKET}"
