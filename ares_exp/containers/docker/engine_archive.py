"""Files of a container as the engine archives them: one request for each path, and nothing needed in the container."""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Callable, Collection
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import EngineError
from ares_exp.containers.docker.transfer import open_archive
from ares_exp.errors import CaptureError
from ares_exp.filesystem.delta import Entry
from ares_exp.filesystem.objects import ObjectStore
from ares_exp.filesystem.tar_entries import read_tar

if TYPE_CHECKING:
    from docker import APIClient

_DIRECTORY = 1 << 31  # of Go's file mode, which the engine reports
_BLOCK = 512
_MAX_HEADER_BYTES = 1024 * 1024
_BEFORE_A_MEMBER = (b"x", b"g", b"L", b"K")


def read_archives(
    api: APIClient,
    container: str,
    paths: Collection[str],
    added: Collection[str],
    objects: ObjectStore,
    notes: list[str],
    skip: Callable[[str], bool],
) -> dict[str, Entry]:
    """What is at these paths. Blocking.

    Args:
        api: The engine.
        container: Its name.
        paths: Parents first.
        added: Those of them that the image has nothing at: directories among them are read with all that is in them.
        objects: Where contents go.
        notes: Gets a sentence for each thing that is not kept.
        skip: Whether a path is left out.

    Raises:
        CaptureError: An archive could not be read.
        EngineError, requests.exceptions.RequestException: The engine refused, or is gone.
    """
    entries: dict[str, Entry] = {}
    whole = "//"
    notes.append(
        "There is no GNU tar in the container, and the engine's own archives keep no fractions of seconds, no "
        "attributes user.*, and hard links below one new directory alone."
    )
    for path in paths:
        if path.startswith(f"{whole}/") or skip(path):
            continue
        with open_archive(api, container, path) as answer:
            if answer.status_code == 404:  # it was removed meanwhile
                continue
            if answer.status_code != 200:
                raise EngineError(answer.json().get("message", answer.reason), answer.status_code)
            stat = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            file = answer.raw
            if stat["mode"] & _DIRECTORY:
                if path in added:
                    whole = path
                else:
                    file = BytesIO(_first_member(path, file))
            entries |= _read(file, objects, notes, posixpath.dirname(path), skip)
    return entries


def _read(file: Any, objects: ObjectStore, notes: list[str], at: str, skip: Callable[[str], bool]) -> dict[str, Entry]:
    from urllib3.exceptions import HTTPError

    try:
        return read_tar(file, objects, notes=notes, at=at, skip=skip)
    except HTTPError as error:
        raise EngineError(f"it broke off an archive ({error})") from error


def _first_member(path: str, file: IO[bytes]) -> bytes:
    """An archive of a directory alone, without what is in it."""
    data = b""
    while True:
        header = file.read(_BLOCK)
        data += header
        if header[156:157] not in _BEFORE_A_MEMBER:
            return data + bytes(2 * _BLOCK)
        size = int(header[124:135].rstrip(b"\0 ") or b"0", 8)
        if len(data) + size > _MAX_HEADER_BYTES:
            raise CaptureError(f"{path!r} cannot be read: the engine's archive of it has too long a header.")
        data += file.read(-(-size // _BLOCK) * _BLOCK)
