"""Directories of this machine that a Docker container sees, read-only: `ContainerSpec.mounts`."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.engine import address_of_engine
from ares_exp.errors import UnsupportedTaskError

if TYPE_CHECKING:
    from docker.types import Mount


def check_mounts(spec: ContainerSpec, host: str | None) -> None:
    """Checks before the start that the engine can mount directories of this machine.

    Raises:
        UnsupportedTaskError: It runs elsewhere.
    """
    url = urlsplit(address_of_engine(host))
    if spec.mounts and url.scheme != "unix":
        shown = ", ".join(one.target for one in spec.mounts)
        raise UnsupportedTaskError(
            f"The container of {spec.name} is to see directories of this machine ({shown}), but its engine runs "
            f"elsewhere: DOCKER_HOST is {url.geturl()}. Use an engine of this machine, or container=local, or an "
            "agent that is not installed by a mount."
        )


def bind_mounts(spec: ContainerSpec) -> list[Mount]:
    """Returns the mounts of `spec` as the engine takes them."""
    from docker.types import Mount

    return [Mount(one.target, str(one.source), type="bind", read_only=True) for one in spec.mounts]
