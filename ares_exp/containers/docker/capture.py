"""Capture of a container's changes to its image, in one of two ways.

`upper`: reads the upper directory of its overlay until two readings agree, which then is the state at a moment between
them. Takes tens of milliseconds, needs nothing in the image, and root on the engine's machine. `archive`: the engine
lists the changes and archives them; works with any engine, is slower and loses more (`archive_capture`). `auto`:
`upper` if possible.

The container is never paused: an engine that starts a process in a container while it is being paused hangs forever,
with the container. Changes of a derived image's container are told relative to the base image (`stacked`, `BaseFiles`).
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import posixpath
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ares_exp.containers.bounded_reading import Skip, bounded
from ares_exp.containers.docker.archive_capture import ArchiveCapture
from ares_exp.containers.docker.container_lifetime import NAME_PREFIX, remove
from ares_exp.containers.docker.creation import Throttle, create
from ares_exp.containers.docker.engine import INQUIRY_TIMEOUT_SEC, Engine, EngineError, engine_errors, in_thread, reason
from ares_exp.containers.docker.upper_directory import find_upper_directory
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, link_number, sorted_by_path
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import CaptureError, SnapshotMetadataError, SnapshotUnsupportedError

CaptureWay = Literal["auto", "upper", "archive"]

READINGS = 5
"""Bound on the readings until two agree. Each reads only what changed."""

_ENGINE_FILES = frozenset(
    {
        *("/.dockerenv", "/run/.containerenv"),
        *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/sbin/docker-init", "/usr/sbin/docker-init"),
    }
)


class Capture:
    """Captures one container repeatedly; remembers what it has read."""

    def __init__(self, engine: Engine, container: str, way: CaptureWay, lower: StoredChanges | None) -> None:
        """Args: lower: The changes in the container's image, if that is a derived one."""
        self._engine = engine
        self._container = container
        self._way = way
        self._lower = lower
        self._cache = ScanCache()
        self._archive = ArchiveCapture(engine, container)
        self._base_files = BaseFiles(engine, lower.delta.base) if lower is not None else None
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False

    async def run(self, objects: ObjectStore) -> Delta:
        async with self._one_at_a_time, _captures(os.getpid()).slot():
            inspected = await self._inspect()
            points = frozenset(mount["Destination"] for mount in inspected["Mounts"])
            points |= frozenset(inspected["HostConfig"].get("Tmpfs") or {})
            mounted_again = {mount["Target"] for mount in inspected["HostConfig"].get("Mounts") or ()}
            notes = [f"{point!r} is not kept: it is a mount." for point in sorted(points - mounted_again)]
            skip = functools.partial(self._skip, points)
            entries = await self._read(inspected, objects, notes, skip)
            await self._inspect()  # files of a container that ended meanwhile may be missing
            if self._lower is None:
                return Delta(inspected["Image"], entries, tuple(notes))
            merged = await in_thread(lambda: self._relative_to_base(entries, objects))
            return Delta(self._lower.delta.base, merged, tuple(notes))

    async def _inspect(self) -> dict[str, Any]:
        """Inspects the container, which has to be running."""
        found: dict[str, Any] = await in_thread(
            lambda: self._engine.api.inspect_container(self._container), abandon=True
        )
        if self._is_closed or not found["State"]["Running"]:
            raise CaptureError("The changed files cannot be read: the container has ended.")
        return found

    async def _read(
        self, inspected: Mapping[str, Any], objects: ObjectStore, notes: list[str], skip: Skip
    ) -> dict[str, Entry]:
        try:
            if self._way == "archive":
                raise SnapshotUnsupportedError("the option says `archive`")
            upper = await asyncio.to_thread(find_upper_directory, inspected)
        except SnapshotUnsupportedError as error:
            if self._way == "upper":
                raise SnapshotUnsupportedError(
                    f"The upper directory of the container {self._container} cannot be read, because {error}. Run as "
                    "root on the engine's machine, or set container.capture=archive."
                ) from error
            return await self._archive.run(objects, notes, skip)
        return await bounded(lambda skip: self._steady(upper, objects, notes, skip), skip)

    def _skip(self, mount_points: frozenset[str], path: str) -> bool:
        if self._is_closed:
            raise CaptureError("The changed files cannot be read: the container has been stopped.")
        return path in _ENGINE_FILES or any(path == point or path.startswith(f"{point}/") for point in mount_points)

    def _steady(self, upper: Path, objects: ObjectStore, notes: list[str], skip: Skip) -> dict[str, Entry]:
        """Reads until two readings agree. Blocking."""
        before: dict[str, Entry] | None = None
        for _ in range(READINGS):
            found: list[str] = []
            entries = scan(upper, objects, self._cache, notes=found, skip=skip)
            if entries == before:
                notes += found
                return entries
            before = entries
        assert before is not None
        notes += [*found, "Files changed while they were read: a process writes continuously."]
        return before

    def _relative_to_base(self, entries: Mapping[str, Entry], objects: ObjectStore) -> dict[str, Entry]:
        """Returns the changes relative to the base image, and copies the contents of the image's changes. Blocking."""
        assert self._lower is not None
        assert self._base_files is not None
        try:
            merged = stacked(self._lower.delta.entries, entries, self._base_files.has)
            for digest in {chunk for entry in merged.values() for chunk in entry.chunks if chunk is not None}:
                if not objects.keep(digest):
                    objects.put(self._lower.objects.get(digest))
            return merged
        except SnapshotMetadataError as error:
            raise CaptureError(
                f"Files that {self._container} started with are missing in their object store: {error}"
            ) from error
        except engine_errors() as error:
            raise CaptureError(
                f"The changed files of {self._container} cannot be compared with the image "
                f"{self._lower.delta.base}: {reason(error)}."
            ) from error

    async def close(self) -> None:
        """Aborts a running capture, and removes what captures made on the engine. Idempotent."""
        self._is_closed = True
        async with self._one_at_a_time:
            if self._base_files is not None:
                await in_thread(self._base_files.close, pool="removals")


@functools.lru_cache(maxsize=1)
def _captures(pid: int) -> Throttle:
    """Returns the throttle of this process's captures: more at a time are not faster."""
    return Throttle(max(2, os.cpu_count() or 1))


def stacked(
    lower: Mapping[str, Entry], upper: Mapping[str, Entry], base_has: Callable[[str], bool]
) -> dict[str, Entry]:
    """Combines two layers of changes; returns the changes relative to the base of `lower`.

    Args:
        lower: Changes relative to a base.
        upper: Changes relative to the base with `lower`.
        base_has: Returns whether the base has an entry at a path. Called only where `upper` removes an entry of
            `lower`. A whiteout of a path that the base lacks must not be kept: in a new directory it would appear as a
                device.
    """
    found = dict(lower)
    for path, entry in sorted_by_path(upper).items():
        old = found.get(path)
        if entry.kind == "directory" and not entry.opaque:
            # A directory in the place of a file or a whiteout still hides the base's entries.
            hides = old is not None and (old.opaque or old.kind != "directory")
            found[path] = replace(entry, opaque=hides)
            continue
        if old is not None and old.kind == "directory":
            for below in [other for other in found if other.startswith(f"{path}/")]:
                del found[below]
        if entry.kind != "whiteout" or (_is_seen(found, path) and (old is None or base_has(path))):
            found[path] = entry
        else:
            found.pop(path, None)
    return _linked_anew(sorted_by_path(found), upper)


def _is_seen(entries: Mapping[str, Entry], path: str) -> bool:
    """Returns whether an entry of the base is visible at `path`: no directory above hides it."""
    while (path := posixpath.dirname(path)) != "/":
        above = entries.get(path)
        if above is not None and above.opaque:
            return False
    return True


def _linked_anew(entries: dict[str, Entry], upper: Mapping[str, Entry]) -> dict[str, Entry]:
    """Numbers hard links anew: the overlay separates the names of a file that were changed from the others."""
    files: dict[tuple[bool, int], list[str]] = {}
    for path, entry in entries.items():
        if entry.link is not None:
            files.setdefault((path in upper, entry.link), []).append(path)
    for paths in files.values():
        link = link_number(paths[0]) if len(paths) > 1 else None
        entries.update({path: replace(entries[path], link=link) for path in paths})
    return entries


_DIRECTORY = 1 << 31  # of Go's file mode, which the engine reports


class BaseFiles:
    """Entries of one image, asked of a container that is never started. Blocking; calls must not overlap."""

    def __init__(self, engine: Engine, image: str) -> None:
        self._engine = engine
        self._image = image
        self._container: str | None = None
        self._modes: dict[str, int | None] = {"/": _DIRECTORY}

    def has(self, path: str) -> bool:
        """Returns whether the image has an entry at `path`, dangling links included.

        Raises:
            EngineError, docker.errors.DockerException, requests.exceptions.RequestException: The engine refused or is
                gone; `ImageNotFound` among them.
        """
        return self._mode(path) is not None

    def _mode(self, path: str) -> int | None:
        """Returns the mode of the entry, or `None`. Stops at links above it, which the engine would follow."""
        if path not in self._modes:
            above = self._mode(posixpath.dirname(path))
            self._modes[path] = self._asked(path) if above is not None and above & _DIRECTORY else None
        return self._modes[path]

    def _asked(self, path: str) -> int | None:
        engine = self._engine
        if self._container is None:
            name = f"{NAME_PREFIX}base-{secrets.token_hex(6)}"
            request = engine.api.create_container_config(
                self._image, ["-"], labels=owner_labels(), network_disabled=True, host_config={}
            )
            self._container = name
            create(engine, name, request)
        answer = engine.api.head(
            f"{engine.api.base_url}/v{engine.api.api_version}/containers/{self._container}/archive",
            params={"path": path},
            timeout=INQUIRY_TIMEOUT_SEC,
        )
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise EngineError(f"it does not tell whether its image has {path!r}", answer.status_code)
        found: int = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))["mode"]
        return found

    def close(self) -> None:
        """Removes the container, if one was created. Idempotent."""
        container, self._container = self._container, None
        if container is not None:
            remove(self._engine, container)
