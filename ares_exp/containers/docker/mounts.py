"""Read-only directories of this machine that a Docker container sees (`ContainerSpec.mounts`).

A local engine mounts the directories directly. To a remote engine, each directory is copied once, into a volume whose
name is computed from the directory's digest. Later containers mount the same volume. `ares-exp clean --cache` removes
these volumes.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ares_exp.containers.child_process import ChildProcess
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.container import Mount as Directory
from ares_exp.containers.docker.engine import Engine, address_of_engine
from ares_exp.containers.docker.image import work_lock
from ares_exp.containers.docker.leftovers import KEPT_VOLUME
from ares_exp.containers.docker.running import open_archive, put
from ares_exp.containers.ownership import NAME_PREFIX, owner_labels
from ares_exp.errors import UnsupportedTaskError

if TYPE_CHECKING:
    from docker import APIClient
    from docker.types import Mount

_AT = "/ares_exp_mount"
_WHOLE = ".ares_exp-whole"
"""Name of a file that is written to a volume last. If it exists, the copy in the volume is complete."""


def check_mounts(spec: ContainerSpec, host: str | None) -> None:
    """Raises `UnsupportedTaskError` if a task with a compose file has mounts, but the engine is remote."""
    if spec.mounts and spec.compose_file is not None and _is_elsewhere(host):
        shown = ", ".join(one.target for one in spec.mounts)
        raise UnsupportedTaskError(
            f"{spec.name}: cannot mount directories of this machine ({shown}), because the Docker engine runs on "
            f"another machine (DOCKER_HOST={address_of_engine(host)}), and the task has a compose file. Use a local "
            "engine, container=local, or an agent that needs no mount."
        )


def container_mounts(engine: Engine, spec: ContainerSpec, image: str) -> list[Mount]:
    """Returns docker-py's mounts for `spec`. Copies directories to a remote engine if it does not have them. Blocking.

    Raises `TransferError` if a directory cannot be read, and `ContainerStartError` if the lock file cannot be used.
    """
    from docker.types import Mount

    if not _is_elsewhere(engine.host):
        return [Mount(one.target, str(one.source), type="bind", read_only=True) for one in spec.mounts]
    return [
        Mount(one.target, _volume(engine, one, image), type="volume", read_only=True, no_copy=True)
        for one in spec.mounts
    ]


def _is_elsewhere(host: str | None) -> bool:
    return urlsplit(address_of_engine(host)).scheme != "unix"


def _volume(engine: Engine, directory: Directory, image: str) -> str:
    name, api = volume_name(directory), engine.api
    with work_lock(f"{engine.host} {name}", ChildProcess()):
        api.create_volume(name, labels={KEPT_VOLUME: directory.target})
        with _reaching_into(api, name, image) as helper:
            with open_archive(api, helper, f"{_AT}/{_WHOLE}") as answer:
                is_whole = answer.status_code == 200
            if not is_whole:
                put(api, helper, directory.source, _AT, "")
                with tempfile.NamedTemporaryFile(prefix="ares_exp-") as empty:
                    put(api, helper, Path(empty.name), _AT, _WHOLE)
    return name


def volume_name(directory: Directory) -> str:
    """Returns the name of the volume with a directory's contents. Equal contents and targets have the same name."""
    key = f"{directory.digest}\0{directory.target}"
    return f"{NAME_PREFIX}mount-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


@contextmanager
def _reaching_into(api: APIClient, volume: str, image: str) -> Iterator[str]:
    """Yields the id of a container, created but not started, through which files are copied to the volume."""
    from docker.types import Mount

    host_config = api.create_host_config(mounts=[Mount(_AT, volume, type="volume", no_copy=True)])
    container = api.create_container(
        image,
        ["true"],
        name=f"{NAME_PREFIX}mount-{secrets.token_hex(6)}",
        labels=owner_labels(),
        host_config=host_config,
    )["Id"]
    try:
        yield container
    finally:
        api.remove_container(container, force=True)
