"""Capture of the files that a container has changed relative to its image. There are two methods.

- `upper` reads the upper directory of the container's overlay file system, which contains exactly the changed files. It
  repeats this until two reads agree, so that the result is the state at one moment. A read takes tens of milliseconds.
  The method needs root on the engine's machine, but no program in the image.
- `archive` gets the list of changed paths from the engine, and packs the files with GNU `tar` in the container. The
  list contains all deleted paths, but no names that are not UTF-8. It also does not show that a directory was deleted
  and created again.

The option value `auto` selects `upper` if possible, otherwise `archive`. The container is not paused during a capture:
if a process starts in a container while it is being paused, the engine hangs forever.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from ares_exp.cancellation import finish
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.stream import run_program
from ares_exp.containers.filesystem.delta import Delta, Entry, in_directories, is_kept, parents
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.filesystem.tar_entries import GNU_CREATE, READ_SOMETHING, YOUNG_SEC, read_tar
from ares_exp.containers.local.isolation import CAP_SYS_ADMIN, is_root_with, mounts
from ares_exp.errors import CaptureError, SnapshotUnsupportedError

CaptureWay = Literal["auto", "upper", "archive"]

READ_SEC = 300.0
"""Time limit for reading an upper directory."""

READINGS = 5
"""Maximum number of reads until two consecutive reads agree. Each read skips the contents of unchanged files."""

_ENGINE_FILES = frozenset(
    {
        *("/.dockerenv", "/run/.containerenv"),
        *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/sbin/docker-init", "/usr/sbin/docker-init"),
    }
)

_TAR = ["tar", *GNU_CREATE, "--files-from=-"]
_STAT = ["xargs", "-0", "stat", "--printf=%i %s %h %f %.9Y %.9Z %n\\0", "--"]
_SIGNATURE = re.compile(rb"\d+ \d+ \d+ [0-9a-f]+ -?[\d.]+ -?[\d.]+")
_STAT_BYTES = 200  # bound on one record of `stat`, without the name
_DELETED = 2  # a kind of change in the engine's list
_LOST = "\ufffd"
_REGULAR, _ALL_KINDS = 0o100000, 0o170000

_T = TypeVar("_T")
_Skip = Callable[[str], bool]  # whether a path is skipped


class Capture:
    """All captures of one container. A cache avoids reading files that have not changed since the previous capture."""

    def __init__(self, engine: Engine, container: str, way: CaptureWay) -> None:
        self._engine = engine
        self._container = container
        self._way = way
        self._cache = ScanCache()
        self._archive = ArchiveCapture(engine, container)
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False
        self._is_late = False

    async def run(self, objects: ObjectStore) -> Delta:
        """Captures the changed files of the running container.

        Raises `SnapshotUnsupportedError` if the method `upper` is set but not possible, and `CaptureError` for other
        failures.
        """
        async with self._one_at_a_time:
            self._is_late = False
            try:
                inspected = await self._inspect()
                points = frozenset(mount["Destination"] for mount in inspected["Mounts"])
                points |= frozenset(inspected["HostConfig"].get("Tmpfs") or {})
                mounted_again = {mount["Target"] for mount in inspected["HostConfig"].get("Mounts") or ()}
                notes = [f"{point!r} is not captured: it is a mount." for point in sorted(points - mounted_again)]
                skip = functools.partial(self._skip, points)
                entries = await self._read(inspected, objects, notes, skip)
                await self._inspect()  # if the container has ended in the meantime, files may be missing
            except engine_errors() as error:
                raise CaptureError(f"The files of {self._container} could not be captured: {reason(error)}.") from error
            return Delta(inspected["Image"], entries, tuple(notes))

    async def _inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = await in_thread(
            lambda: self._engine.api.inspect_container(self._container), abandon=True
        )
        if self._is_closed or not found["State"]["Running"]:
            raise CaptureError("The changed files cannot be read: the container has ended.")
        return found

    async def _read(
        self, inspected: Mapping[str, Any], objects: ObjectStore, notes: list[str], skip: _Skip
    ) -> dict[str, Entry]:
        try:
            if self._way == "archive":
                raise SnapshotUnsupportedError("container.capture is `archive`")
            upper = await asyncio.to_thread(find_upper_directory, inspected)
        except SnapshotUnsupportedError as error:
            if self._way == "upper":
                raise SnapshotUnsupportedError(
                    f"The directory with the changed files of container {self._container} cannot be read, because "
                    f"{error}. Run as root on the engine's machine, or set container.capture=archive."
                ) from error
            return await self._archive.run(objects, notes, skip)
        reading = asyncio.ensure_future(asyncio.to_thread(self._steady, upper, objects, notes, skip))
        try:
            await asyncio.wait({reading}, timeout=READ_SEC)
        finally:
            self._is_late = True  # or the caller was cancelled; ends the reading
            await finish(asyncio.wait({reading}))
        return reading.result()

    def _skip(self, mount_points: frozenset[str], path: str) -> bool:
        if self._is_closed:
            raise CaptureError("The changed files cannot be read: the container has been stopped.")
        if self._is_late:
            raise CaptureError(f"The changed files could not be read within {READ_SEC:g} s.")
        return path in _ENGINE_FILES or any(path == point or path.startswith(f"{point}/") for point in mount_points)

    def _steady(self, upper: Path, objects: ObjectStore, notes: list[str], skip: _Skip) -> dict[str, Entry]:
        """Reads the upper directory until two consecutive reads agree, at most `READINGS` times. Blocking."""
        before: dict[str, Entry] | None = None
        for _ in range(READINGS):
            found: list[str] = []
            entries = scan(upper, objects, self._cache, notes=found, skip=skip)
            if entries == before:
                notes += found
                return entries
            before = entries
        assert before is not None
        notes += [*found, "The files may be inconsistent, because a process changed them during every read."]
        return before

    async def close(self) -> None:
        """Aborts a running capture, and waits for its end. Idempotent."""
        self._is_closed = True
        async with self._one_at_a_time:
            pass


_ALL_IDS = ["0", "0", "4294967295"]


def find_upper_directory(inspected: Mapping[str, Any], proc: Path = Path("/proc")) -> Path:
    """Returns the upper directory of a container's overlay file system, which contains the changed files. Blocking.

    `inspected` is the engine's description of the running container. Raises `SnapshotUnsupportedError` if this process
    cannot read the directory. The message is a clause that follows "because".
    """
    process = proc / str(inspected["State"]["Pid"])
    if not is_root_with(CAP_SYS_ADMIN, proc=proc):  # the kernel hides attributes `trusted.*` from other processes
        raise SnapshotUnsupportedError("reading the overlay needs root with CAP_SYS_ADMIN")
    try:
        table = list(mounts(process))
        ids = (process / "uid_map").read_text().split()
    except OSError:
        raise SnapshotUnsupportedError("its processes are not visible here: the engine runs elsewhere") from None
    # The engine mounts files from a directory whose name contains the id.
    if not any(inspected["Id"] in mount.root for mount in table):
        raise SnapshotUnsupportedError(
            f"process {process.name} does not belong to this container: the engine runs elsewhere"
        )
    if ids != _ALL_IDS:
        raise SnapshotUnsupportedError("its user ids are mapped (userns-remap, or a rootless engine)")
    root = [mount for mount in table if mount.point == Path("/")][-1]
    if root.kind != "overlay":
        raise SnapshotUnsupportedError("the engine's storage driver does not use overlayfs")
    options = {key: value for key, _, value in (option.partition("=") for option in root.options)}
    for feature in ("redirect_dir", "metacopy"):  # the upper directory is then incomplete
        module = Path("/sys/module/overlay/parameters", feature)
        default = "on" if module.exists() and module.read_text().strip() == "Y" else "off"
        if options.get(feature, default) == "on":
            raise SnapshotUnsupportedError(f"its overlay file system uses {feature}, which is not supported")
    told = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    upper = Path(told or options.get("upperdir", ""))
    if not upper.is_absolute() or not upper.is_dir():
        raise SnapshotUnsupportedError(f"its upper directory {upper} does not exist on this machine")
    return upper


class ArchiveCapture:
    """All captures of one container with the method `archive`. Files that have not changed are not read again."""

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self._container = container
        self._known: dict[str, tuple[bytes, Entry]] = {}

    async def run(self, objects: ObjectStore, notes: list[str], skip: _Skip) -> dict[str, Entry]:
        """Reads the changed files of the container. Raises `CaptureError` if that fails."""
        listed = await in_thread(lambda: self._listed(notes, skip), abandon=True)
        deleted = {path for path, kind in listed.items() if kind == _DELETED}
        above = {parent for path in listed for parent in parents(path)}
        there = sorted((listed.keys() | above) - (deleted - above))
        try:
            entries = await self._by_tar(there, objects, notes, skip)
        except engine_errors(CaptureError) as error:
            raise CaptureError(
                f"`tar` in the container {self._container} cannot read its changed files: {reason(error)}. Use an "
                "image with GNU tar, or run as root on the engine's machine, which does not require tar."
            ) from error
        for path in deleted:
            if path in above and path in entries:  # some engines list an opaque directory like this
                entries[path] = replace(entries[path], opaque=True)
            elif path not in above:
                entries[path] = Entry("whiteout")
        return in_directories(entries)

    def _listed(self, notes: list[str], skip: _Skip) -> dict[str, int]:
        found: dict[str, int] = {
            change["Path"]: change["Kind"] for change in self._engine.api.diff(self._container) or []
        }
        lost = [path for path in found if _LOST in path]
        if lost:
            notes.append(
                f"{len(lost)} paths are not captured, because their names are not UTF-8 (first: {min(lost)!r})."
            )
        return {
            path: kind
            for path, kind in found.items()
            if path != "/" and _LOST not in path and is_kept(path) and not skip(path)
        }

    async def _by_tar(self, paths: list[str], objects: ObjectStore, notes: list[str], skip: _Skip) -> dict[str, Entry]:
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
            f"{path!r} is not captured: it is a socket, or was removed before it was read."
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
        """Returns signatures of files, made from their `stat` fields. Returns `{}` if `stat` lacks a needed option."""
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
    """Yields a note for each captured hard link to an unchanged file of the image. The link becomes a separate file."""
    paths: dict[tuple[bytes, ...], list[str]] = {}
    for path, signature in signatures.items():
        inode, _, names, mode = signature.split(b" ")[:4]
        if names != b"1" and int(mode, 16) & _ALL_KINDS == _REGULAR:
            paths.setdefault((inode, names), []).append(path)
    for (_, names), listed in paths.items():
        if len(listed) != int(names):
            yield (f"{listed[0]!r} is captured as a separate file, although it is a hard link to a file of the image.")


def _tells(signature: bytes) -> bool:
    """Returns whether every later change of the file would certainly change its signature."""
    _, _, names, mode, _, changed = signature.split(b" ")
    is_plain = names == b"1" and int(mode, 16) & _ALL_KINDS == _REGULAR
    return is_plain and time.time() - float(changed) > YOUNG_SEC
