"""File transfer into and out of a Docker container with the engine's archive requests. All functions block."""

from __future__ import annotations

import base64
import json
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.containers.archive import pack, unpack_directory, unpack_file
from ares_exp.containers.docker.engine import CALL_TIMEOUT_SEC, EngineError
from ares_exp.errors import TransferError

if TYPE_CHECKING:
    from docker import APIClient
    from requests import Response

# Bits of Go's file mode, which the engine reports.
_DIRECTORY, _SYMLINK = 1 << 31, 1 << 27
_MAX_LINKS = 10


def put(api: APIClient, container: str, source: Path, directory: str, file_name: str) -> None:
    """Copies `source` into the existing `directory` of the container. `archive.pack` describes the arguments."""
    with pack(source, file_name) as packed:
        api.put_archive(container, directory, packed)


def get(api: APIClient, container: str, source: str, target: Path) -> None:
    """Copies the file or directory `source` from the container to `target`. Copies the target of a link, not the link.

    Raises `TransferError` if `source` is missing, or cannot be unpacked safely.
    """
    path = source
    for _ in range(_MAX_LINKS):
        with open_archive(api, container, path) as answer:
            if answer.status_code == 404:
                raise TransferError(f"Cannot download {source}: no such file in the container.")
            if answer.status_code != 200:
                raise EngineError(answer.json().get("message", answer.reason), answer.status_code)
            stat = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            if stat["mode"] & _DIRECTORY:
                return unpack_directory(answer.raw, target, strip_root=True)
            if not stat["mode"] & _SYMLINK:
                return unpack_file(answer.raw, target)
            path = posixpath.join(posixpath.dirname(path), stat["linkTarget"])
    raise TransferError(f"Cannot download {source}: its path has more than {_MAX_LINKS} symbolic links.")


def exists(api: APIClient, container: str, path: str) -> bool:
    """Returns whether a path exists in a container. Also works for a container that has not been started."""
    with open_archive(api, container, path) as answer:
        return answer.status_code != 404


def open_archive(api: APIClient, container: str, path: str) -> Response:
    """Requests a tar archive of a path. Unlike with docker-py's method, the response can be closed early."""
    answer: Response = api.get(
        f"{api.base_url}/v{api.api_version}/containers/{container}/archive",
        params={"path": path},
        headers={"Accept-Encoding": "identity"},
        stream=True,
        timeout=CALL_TIMEOUT_SEC,
    )
    return answer
