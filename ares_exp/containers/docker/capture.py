"""Capture of a container's changes to its image, in one of two ways.

`upper`: reads the upper directory of its overlay until two readings agree, which then is the state at a moment between
them. Takes tens of milliseconds, needs nothing in the image, and root on the engine's machine. `archive`: the engine
lists the changes and archives them; works with any engine, is slower and loses more (`archive_capture`). `auto`:
`upper` if possible.

The container is never paused: an engine that starts a process in a container while it is being paused hangs forever,
with the container.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ares_exp.containers.bounded_reading import Skip, bounded
from ares_exp.containers.docker.archive_capture import ArchiveCapture
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.filesystem.delta import Delta, Entry
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local.mount_table import mounts
from ares_exp.errors import CaptureError, SnapshotUnsupportedError

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

    def __init__(self, engine: Engine, container: str, way: CaptureWay) -> None:
        self._engine = engine
        self._container = container
        self._way = way
        self._cache = ScanCache()
        self._archive = ArchiveCapture(engine, container)
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False

    async def run(self, objects: ObjectStore) -> Delta:
        """Reads the changes of the running container.

        Raises:
            CaptureError: They could not be read.
            SnapshotUnsupportedError: They cannot be read in the way that the option says.
        """
        async with self._one_at_a_time:
            try:
                inspected = await self._inspect()
                points = frozenset(mount["Destination"] for mount in inspected["Mounts"])
                points |= frozenset(inspected["HostConfig"].get("Tmpfs") or {})
                mounted_again = {mount["Target"] for mount in inspected["HostConfig"].get("Mounts") or ()}
                notes = [f"{point!r} is not kept: it is a mount." for point in sorted(points - mounted_again)]
                skip = functools.partial(self._skip, points)
                entries = await self._read(inspected, objects, notes, skip)
                await self._inspect()  # files of a container that ended meanwhile may be missing
            except engine_errors() as error:
                raise CaptureError(f"The files of {self._container} could not be captured: {reason(error)}.") from error
            return Delta(inspected["Image"], entries, tuple(notes))

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

    async def close(self) -> None:
        """Aborts a running capture, and waits for its end. Idempotent."""
        self._is_closed = True
        async with self._one_at_a_time:
            pass


_CAP_SYS_ADMIN = 1 << 21
_ALL_IDS = ["0", "0", "4294967295"]


def find_upper_directory(inspected: Mapping[str, Any], proc: Path = Path("/proc")) -> Path:
    """Finds the upper directory of a running container. Blocking.

    Args:
        inspected: The inspected container.
        proc: The mount point of procfs.

    Raises:
        SnapshotUnsupportedError: It cannot be read from here; with the reason, to follow "because".
    """
    process = proc / str(inspected["State"]["Pid"])
    if not _can_read_overlays(proc):
        raise SnapshotUnsupportedError("this process is not root with CAP_SYS_ADMIN, as reading overlays needs")
    try:
        table = list(mounts(process))
        ids = (process / "uid_map").read_text().split()
    except OSError:
        raise SnapshotUnsupportedError("its processes are not visible here: the engine runs elsewhere") from None
    # The engine mounts files from a directory with this name.
    if not any(inspected["Id"] in mount.root for mount in table):
        raise SnapshotUnsupportedError(
            f"process {process.name} is not this container's here: the engine runs elsewhere"
        )
    if ids != _ALL_IDS:
        raise SnapshotUnsupportedError("its user ids are mapped (userns-remap, or a rootless engine)")
    root = [mount for mount in table if mount.point == Path("/")][-1]
    if root.kind != "overlay":
        raise SnapshotUnsupportedError("the engine's storage driver is not an overlay")
    options = {key: value for key, _, value in (option.partition("=") for option in root.options)}
    for feature in ("redirect_dir", "metacopy"):  # the directory is then incomplete
        if options.get(feature, _default(feature)) == "on":
            raise SnapshotUnsupportedError(f"its overlay uses {feature}")
    told = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
    upper = Path(told or options.get("upperdir", ""))
    if not upper.is_absolute() or not upper.is_dir():
        raise SnapshotUnsupportedError(f"its upper directory {upper} is not visible here")
    return upper


def _can_read_overlays(proc: Path) -> bool:
    """Returns whether this process sees attributes `trusted.*`, which the kernel hides from others."""
    try:
        status = (proc / "self" / "status").read_text()
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return os.geteuid() == 0 and found is not None and bool(int(found[1], 16) & _CAP_SYS_ADMIN)


def _default(feature: str) -> str:
    try:
        return "on" if Path(f"/sys/module/overlay/parameters/{feature}").read_text().strip() == "Y" else "off"
    except OSError:
        return "off"
