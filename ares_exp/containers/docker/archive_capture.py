"""Capture by archives: the engine lists a container's changes; `tar` in the container, or the engine, packs them.

For engines whose directories cannot be read from here. The list costs the engine a walk over the image. It has no
opaque directories, but lists each deletion in them, and loses names that are not UTF-8.
"""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Callable, Collection
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import EngineError
from ares_exp.containers.docker.transfer import open_archive
from ares_exp.containers.filesystem.delta import Entry
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.filesystem.tar_entries import read_tar
from ares_exp.errors import CaptureError

if TYPE_CHECKING:
    from docker import APIClient
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO, TypeVar

from ares_exp.containers.bounded_reading import Skip, bounded
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread
from ares_exp.containers.docker.stream import run_program
from ares_exp.containers.filesystem.delta import in_directories, is_kept, parents
from ares_exp.containers.filesystem.tar_program import GNU_CREATE, READ_SOMETHING, YOUNG_SEC

_TAR = ["tar", *GNU_CREATE, "--files-from=-"]
_STAT = ["xargs", "-0", "stat", "--printf=%i %s %h %f %.9Y %.9Z %n\\0", "--"]
_SIGNATURE = re.compile(rb"\d+ \d+ \d+ [0-9a-f]+ -?[\d.]+ -?[\d.]+")
_STAT_BYTES = 200  # of one answer, without the name
_ADDED, _DELETED = 1, 2  # kinds of changes, in the engine's list
_LOST = "\ufffd"
_REGULAR, _ALL_KINDS = 0o100000, 0o170000

_T = TypeVar("_T")


class ArchiveCapture:
    """Captures one container repeatedly, without reading unchanged files again."""

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self._container = container
        self._known: dict[str, tuple[bytes, Entry]] = {}

    async def run(self, objects: ObjectStore, notes: list[str], skip: Skip) -> dict[str, Entry]:
        """Reads the changes.

        Args:
            objects: The store for file contents.
            notes: Gets a sentence for each thing that is not captured.
            skip: Returns whether a path is skipped.

        Raises:
            CaptureError: They could not be read.
            EngineError, docker.errors.DockerException, requests.exceptions.RequestException: The engine refused or is
                gone.
        """
        listed = await in_thread(lambda: self._listed(notes, skip), abandon=True)
        deleted = {path for path, kind in listed.items() if kind == _DELETED}
        above = {parent for path in listed for parent in parents(path)}
        there = sorted((listed.keys() | above) - (deleted - above))
        failures: tuple[type[Exception], ...] = (CaptureError, *engine_errors())
        try:
            entries = await self._by_tar(there, objects, notes, skip)
        except failures:  # no tar, or one with other options
            added = {path for path, kind in listed.items() if kind == _ADDED}
            entries = await bounded(
                lambda skip: read_archives(self._engine.api, self._container, there, added, objects, notes, skip), skip
            )
        for path in deleted:
            if path in above and path in entries:  # some engines list an opaque directory like this
                entries[path] = replace(entries[path], opaque=True)
            elif path not in above:
                entries[path] = Entry("whiteout")
        return in_directories(entries)

    def _listed(self, notes: list[str], skip: Skip) -> dict[str, int]:
        """Returns the changed paths with the kinds of their changes."""
        found: dict[str, int] = {
            change["Path"]: change["Kind"] for change in self._engine.api.diff(self._container) or []
        }
        lost = [path for path in found if _LOST in path]
        if lost:
            notes.append(f"{len(lost)} paths whose names are not UTF-8 are not kept, the first is {min(lost)!r}.")
        return {
            path: kind
            for path, kind in found.items()
            if path != "/" and _LOST not in path and is_kept(path) and not skip(path)
        }

    async def _by_tar(self, paths: list[str], objects: ObjectStore, notes: list[str], skip: Skip) -> dict[str, Entry]:
        signatures = await self._signatures(paths)
        old = {path: self._known[path][1] for path in paths if self._is_known(path, signatures.get(path), objects)}
        new = [path for path in paths if path not in old]
        more: list[str] = []
        read, exit_code = await self._run(_TAR, new, lambda file: read_tar(file, objects, notes=more, skip=skip))
        if exit_code not in READ_SOMETHING:
            raise CaptureError(f"tar in the container ended with exit code {exit_code}.")
        noted = "".join(more)
        notes += more
        notes += [
            f"{path!r} is not kept: it is a socket, or was removed before it was read."
            for path in new
            if path not in read and repr(path) not in noted
        ]
        notes += _lost_names(signatures)
        self._known = {path: self._known[path] for path in old}
        for path in signatures.keys() & read.keys():
            if read[path].kind == "file" and _tells(signatures[path]):
                self._known[path] = (signatures[path], read[path])
        return {**old, **read}

    async def _signatures(self, paths: list[str]) -> dict[str, bytes]:
        """Returns, by path, signatures that change with the files; empty if `stat` there lacks the options."""
        most = sum(len(path) * 4 + _STAT_BYTES for path in paths)
        answer, _ = await self._run(_STAT, paths, lambda file: file.read(most + 1))
        found = {}
        for record in answer.split(b"\0")[:-1] if len(answer) <= most else []:
            signature, _, name = record.partition(b" ./")
            if _SIGNATURE.fullmatch(signature):
                found[f"/{os.fsdecode(name)}"] = signature
        return found

    def _is_known(self, path: str, signature: bytes | None, objects: ObjectStore) -> bool:
        known = self._known.get(path)
        if known is None or known[0] != signature:
            return False
        return all(chunk is None or objects.keep(chunk) for chunk in known[1].chunks)

    async def _run(self, command: list[str], paths: Iterable[str], read: Callable[[BinaryIO], _T]) -> tuple[_T, int]:
        stdin = b"".join(os.fsencode(f".{path}\0") for path in paths)  # no name starts with a dash
        return await run_program(self._engine, self._container, command, stdin, read)


def _lost_names(signatures: Mapping[str, bytes]) -> Iterator[str]:
    """Yields a sentence for each hard-linked file with an unlisted name, which belongs to a file of the image."""
    paths: dict[tuple[bytes, ...], list[str]] = {}
    for path, signature in signatures.items():
        inode, _, names, mode = signature.split(b" ")[:4]
        if names != b"1" and int(mode, 16) & _ALL_KINDS == _REGULAR:
            paths.setdefault((inode, names), []).append(path)
    for (_, names), listed in paths.items():
        if len(listed) != int(names):
            yield f"{listed[0]!r} is captured as a separate file: it is another name of a file of the image."


def _tells(signature: bytes) -> bool:
    """Returns whether a later change changes the signature: true for a regular, singly linked file changed long ago."""
    _, _, names, mode, _, changed = signature.split(b" ")
    is_plain = names == b"1" and int(mode, 16) & _ALL_KINDS == _REGULAR
    return is_plain and time.time() - float(changed) > YOUNG_SEC


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
    """Reads the files at these paths from the engine's archives, one request per path. Blocking.

    Args:
        api: The engine.
        container: Its name.
        paths: Parents first.
        added: Those of them that the image does not have: directories among them are read with their contents.
        objects: The store for file contents.
        notes: Gets a sentence for each thing that is not captured.
        skip: Returns whether a path is skipped.

    Raises:
        CaptureError: An archive cannot be read.
        EngineError, requests.exceptions.RequestException: The engine refused or is
                gone.
    """
    entries: dict[str, Entry] = {}
    whole = "//"
    notes.append(
        "The container has no GNU tar, and the engine's archives lose fractions of seconds, "
        "attributes user.*, and hard links except those below one new directory."
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
    """Reads an archive's first member, a directory, without its contents."""
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
