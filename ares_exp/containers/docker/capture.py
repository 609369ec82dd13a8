"""What a container changed of its image, read in one of two ways.

`upper`: the upper directory of its overlay is read until two readings agree: so it was at a moment between them. Takes
tens of milliseconds, needs nothing in the image, and root on the engine's machine. `archive`: the engine lists the
changes and archives them; works wherever the engine is, costs more and keeps less (`archive_capture`). `auto` is the
first where it is possible.

The container is never paused: an engine that is starting a process in a container which is being paused hangs, and the
container with it, for good.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ares_exp.containers.bounded_reading import Skip, bounded
from ares_exp.containers.docker.archive_capture import ArchiveCapture
from ares_exp.containers.docker.base_files import BaseFiles
from ares_exp.containers.docker.creation import Throttle
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.stacked_changes import stacked
from ares_exp.containers.docker.upper_directory import find_upper_directory
from ares_exp.errors import CaptureError, SnapshotMetadataError, SnapshotUnsupportedError
from ares_exp.filesystem.delta import Delta, Entry, StoredChanges
from ares_exp.filesystem.objects import ObjectStore
from ares_exp.filesystem.overlay_upper import ScanCache, scan

CaptureWay = Literal["auto", "upper", "archive"]

READINGS = 5
"""So often the files are read at most, for two readings that are the same. Only what changed is read again."""

_ENGINE_FILES = frozenset(
    ("/.dockerenv", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/sbin/docker-init", "/usr/sbin/docker-init")
)


class Capture:
    """Captures one container again and again; remembers what it has read."""

    def __init__(self, engine: Engine, container: str, way: CaptureWay, lower: StoredChanges | None) -> None:
        """Reads nothing yet.

        Args:
            engine: The engine.
            container: Its name.
            way: See above.
            lower: The changes that are part of the container's image, if it is a derived one.
        """
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
        """As `SnapshottableContainer.capture_changes`.

        Raises:
            CaptureError, SnapshotUnsupportedError: As there.
            EngineError, docker.errors.DockerException, requests.exceptions.RequestException: The engine refused, or is
                gone.
        """
        async with self._one_at_a_time, _captures(os.getpid()).slot():
            inspected = await self._inspect()
            notes = list(_unkept_mounts(inspected))
            skip = functools.partial(self._skip, _mount_points(inspected))
            entries = await self._read(inspected, objects, notes, skip)
            await self._inspect()  # of one that ended meanwhile, files may have been missing
            if self._lower is None:
                return Delta(inspected["Image"], entries, tuple(notes))
            merged = await in_thread(lambda: self._relative_to_base(entries, objects))
            return Delta(self._lower.delta.base, merged, tuple(notes))

    async def _inspect(self) -> dict[str, Any]:
        """What the engine says of the container, which runs."""
        found: dict[str, Any] = await in_thread(
            lambda: self._engine.api.inspect_container(self._container), abandon=True
        )
        if self._is_closed or not found["State"]["Running"]:
            raise CaptureError("The changed files were not read: the container has ended.")
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
            raise CaptureError("The changed files were not read: the container has been stopped.")
        return _is_of_the_engine(mount_points, path)

    def _steady(self, upper: Path, objects: ObjectStore, notes: list[str], skip: Skip) -> dict[str, Entry]:
        """Reads until two readings are the same. Blocking."""
        before: dict[str, Entry] | None = None
        for _ in range(READINGS):
            found: list[str] = []
            entries = scan(upper, objects, self._cache, notes=found, skip=skip)
            if entries == before:
                notes += found
                return entries
            before = entries
        assert before is not None
        notes += [*found, "Files changed while they were read: a process was writing all the time."]
        return before

    def _relative_to_base(self, entries: Mapping[str, Entry], objects: ObjectStore) -> dict[str, Entry]:
        """The changes with those that the image has already, whose contents are put with the others. Blocking."""
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
                f"Files of {self._container} that it started with are not where it had them from any more: {error}"
            ) from error
        except engine_errors() as error:
            raise CaptureError(
                f"What of the changed files in {self._container} is in the image {self._lower.delta.base} cannot be "
                f"told: {reason(error)}."
            ) from error

    async def close(self) -> None:
        """Ends a capture that is under way, and removes what captures made on the engine. Idempotent."""
        self._is_closed = True
        async with self._one_at_a_time:
            if self._base_files is not None:
                await in_thread(self._base_files.close, lane="removals")


@functools.lru_cache(maxsize=1)
def _captures(pid: int) -> Throttle:
    """More at a time would be no faster."""
    return Throttle(max(2, os.cpu_count() or 1))


def _mount_points(inspected: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(mount["Destination"] for mount in inspected["Mounts"]) | frozenset(
        inspected["HostConfig"].get("Tmpfs") or {}
    )


def _is_of_the_engine(mount_points: frozenset[str], path: str) -> bool:
    return path in _ENGINE_FILES or any(path == point or path.startswith(f"{point}/") for point in mount_points)


def _unkept_mounts(inspected: Mapping[str, Any]) -> list[str]:
    return [f"{point!r} is not kept: it is a mount." for point in sorted(_mount_points(inspected))]
