"""The factory of `container=podman`: Podman implements the Docker engine's API at a separate socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ares_exp.containers.docker.engine import PODMAN_SOCKET
from ares_exp.containers.docker.factory import DockerContainerFactory
from ares_exp.containers.ownership import Leftover


class PodmanContainerFactory(DockerContainerFactory):
    """Creates containers with Podman's service: the system's service for root, otherwise the user's.

    It behaves like `container=docker`, except for the address: `CONTAINER_HOST`, or by default the socket.
    """

    name = "podman"

    @classmethod
    def default_host(cls) -> str:
        runtime = "/run" if os.getuid() == 0 else os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
        return os.environ.get("CONTAINER_HOST") or f"unix://{runtime}{PODMAN_SOCKET}"

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        """Lists nothing on a machine without Podman."""
        if "CONTAINER_HOST" in os.environ or Path(urlsplit(cls.default_host()).path).exists():
            yield from super().find_leftovers(images=images, snapshots=snapshots)
