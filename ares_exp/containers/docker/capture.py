"""Capture of the files that a container has changed relative to its image. There are two methods.

- `upper` reads the upper directory of the container's overlay file system, which contains exactly the changed files. It
  repeats this until two reads agree, so that the result is the state at one moment. A read takes tens of milliseconds.
  The method needs root on the engine's machine, but no program in the image.
- `archive` gets the list of changed paths from the engine, and packs the files with GNU `tar` in the container. The
  list contains all deleted paths, but no names that are not UTF-8. It also does not show that a directory was deleted
  and created again. The archive is untrusted. It is read as a stream and never extracted.

The option value `auto` selects `upper` if possible, otherwise `archive`. The container is not paused during a capture:
if a process starts in a container while it is being paused, the engine hangs forever.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, Self, TypeVar, cast

from ares_exp.cancellation import finish
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason, run_program
from ares_exp.containers.filesystem.delta import (
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_MTIME_NS,
    MAX_NAME_BYTES,
    MAX_PATH_BYTES,
    ChunkWriter,
    Delta,
    Entry,
    EntryKind,
    add_note,
    in_directories,
    is_kept,
    is_kept_xattr,
    link_number,
    parents,
    sorted_by_path,
)
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.containers.local.isolation import CAP_SYS_ADMIN, is_root_with, mounts
from ares_exp.errors import CaptureError, SnapshotUnsupportedError
from ares_exp.records.secrets import KnownSecrets

CaptureWay = Literal["auto", "upper", "archive"]

READ_SEC = 300.0
"""Time limit for reading an upper directory."""

READINGS = 5
"""Maximum number of reads until two consecutive reads agree. Each read skips the contents of unchanged files."""

GNU_CREATE = (
    "--create",
    "--null",
    "--no-recursion",
    "--format=posix",
    "--sparse",
    "--numeric-owner",
    "--xattrs",
    "--xattrs-include=*",
)
"""Arguments of GNU tar that preserve all metadata. The caller adds `--files-from` with the files to read."""

READ_SOMETHING = (0, 1, 2)
"""Accepted exit codes of tar: all files were read, some files changed during the read, some could not be read."""

YOUNG_SEC = 2.0
"""Seconds after a change in which a file may change again without a new timestamp, so that it is read again."""

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


_MAX_HEADER_BYTES = 2**20  # for the data before one member: long names, attributes, the map of a sparse file
_MAX_ENDS = 10  # `tarfile` keeps skipping after the end, as far as a header says
_XATTR = "SCHILY.xattr."
_KINDS: dict[bytes, EntryKind] = {
    **dict.fromkeys((tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE), cast(Any, "file")),
    tarfile.LNKTYPE: "file",
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.FIFOTYPE: "fifo",
}


def read_tar(
    file: IO[bytes],
    objects: ObjectStore,
    *,
    notes: list[str],
    skip: Callable[[str], bool] = lambda path: False,
) -> dict[str, Entry]:
    """Reads an archive, stores the contents of its files in `objects`, and returns entries of a delta, parents first.

    The format is ustar, GNU or PAX, including sparse files and `SCHILY.xattr.*`. The caller must add deletions, and
    parent directories that are not in the archive. Leaves out paths for which `skip` returns true, and files that
    cannot be captured, with a sentence in `notes`. Raises `CaptureError` if the archive is malformed or ends early, is
    too large, contains a path with `..`, or contains a known secret.
    """
    stream = _BoundedStream(file, 2 * MAX_BYTES + 2**30)
    reader = _TarReader(objects, notes, skip)
    try:
        with stream.reading_header():
            archive = tarfile.open(  # noqa: SIM115  # closed below; the constructor already reads a header
                fileobj=cast(IO[bytes], stream), mode="r|", tarinfo=_Member, encoding="utf-8", errors="surrogateescape"
            )
        with archive, ThreadPoolExecutor(3, "ares-exp-tar") as pool:
            while True:
                with stream.reading_header():
                    member = archive.next()
                if member is None:
                    return reader.entries()
                reader.add(archive, member, pool)
                _pass(archive)
    except _ARCHIVE_ERRORS as error:
        raise CaptureError(f"The archive of the container's files cannot be read: {error}.") from None


def _pass(archive: tarfile.TarFile) -> None:
    """Skips the rest of a member's content, and removes the member from the list that `tarfile` keeps in memory."""
    stream = cast(Any, archive).fileobj
    if stream.tell() < archive.offset - 1:
        stream.seek(archive.offset - 1)
    cast(Any, archive).members.clear()


_ARCHIVE_ERRORS = (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError, EOFError)


class _Member(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile, /) -> Self:
        """Reads a header. Raises `EOFError` for a damaged header, where `tarfile` would silently end the archive."""
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise EOFError(f"it ends early, or is damaged ({error})") from None


class _BoundedStream:
    """A stream of an archive that limits how many bytes `tarfile` reads in total, and for one header."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._total, self._header = file, most, 0
        self._in_header, self._ends = False, 0

    @contextmanager
    def reading_header(self) -> Iterator[None]:
        self._header, self._in_header = _MAX_HEADER_BYTES, True
        yield
        self._in_header = False

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._total -= len(data)
        self._ends += not data
        if self._ends > _MAX_ENDS:
            raise EOFError("it ends early")
        if self._in_header:
            self._header -= len(data)
        if self._total < 0 or self._header < 0:
            raise ValueError("it is too long" if self._total < 0 else "the header of a file in it is too long")
        return data


class _TarReader:
    def __init__(self, objects: ObjectStore, notes: list[str], skip: Callable[[str], bool]) -> None:
        self._objects, self._notes, self._skip = objects, notes, skip
        self._known = KnownSecrets()
        self._entries: dict[str, Entry] = {}
        self._bytes = 0

    def entries(self) -> dict[str, Entry]:
        return sorted_by_path(self._entries)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, pool: Executor) -> None:
        path = self._path(member.name)
        if not path or not is_kept(path) or self._skip(path):
            return
        kind = _KINDS.get(member.type)
        if kind is None:
            add_note(
                self._notes, f"{path!r} is not captured: snapshots do not support devices and other special files."
            )
            return
        if member.type == tarfile.LNKTYPE:
            entry = self._linked(path, member)
        else:
            entry = self._metadata(kind, path, member)
            if kind == "file":
                entry = self._with_content(entry, path, archive, member, pool)
        self._bytes += entry.size
        if len(self._entries) >= MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} files (last read: {path!r})")
        if self._bytes > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes of files (last read: {path!r})")
        if path in self._entries:
            raise ValueError(f"it contains {path!r} twice")
        self._entries[path] = entry

    def _path(self, name: str) -> str:
        names = [part for part in name.split("/") if part not in ("", ".")]
        path = "".join(f"/{part}" for part in names)
        data = os.fsencode(path)
        if ".." in names or b"\0" in data:
            raise ValueError(f"it contains the path {name!r}, which is outside of the container")
        if len(data) > MAX_PATH_BYTES or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in names):
            raise ValueError(f"a path in it is too long: {name[:80]!r}…")
        return path

    def _linked(self, path: str, member: tarfile.TarInfo) -> Entry:
        first = self._path(member.linkname)
        entry = self._entries.get(first)
        if entry is None or entry.kind == "directory":
            raise ValueError(f"{path!r} is a hard link to {first!r}, which is not a file in the archive")
        if entry.kind == "file" and entry.link is None:  # `cp -al` also gives symlinks second names
            entry = self._entries[first] = replace(entry, link=link_number(first))
        return entry

    def _metadata(self, kind: EntryKind, path: str, member: tarfile.TarInfo) -> Entry:
        if not (0 <= member.uid < 2**32 - 1 and 0 <= member.gid < 2**32 - 1):
            raise ValueError(f"the owner of {path!r} is not a valid user or group id")
        # The digits of PAX headers have nanoseconds, which a float cannot represent exactly.
        found = Decimal(member.pax_headers.get("mtime") or member.mtime).scaleb(9)
        entry = Entry(
            kind,
            mode=member.mode & 0o7777,
            uid=member.uid,
            gid=member.gid,
            mtime_ns=int(max(Decimal(-MAX_MTIME_NS), min(Decimal(MAX_MTIME_NS), found))),
        )
        if kind == "symlink":
            target = os.fsencode(member.linkname)
            if not target or b"\0" in target or len(target) > MAX_PATH_BYTES:
                raise ValueError(f"the link {path!r} has an invalid target")
            return replace(entry, mode=0, target=member.linkname)
        if kind == "fifo":
            return entry
        return replace(
            entry,
            xattrs={
                name.removeprefix(_XATTR): value.encode("utf-8", "surrogateescape")
                for name, value in member.pax_headers.items()
                if name.startswith(_XATTR) and is_kept_xattr(name.removeprefix(_XATTR))
            },
        )

    def _with_content(
        self, entry: Entry, path: str, archive: tarfile.TarFile, member: tarfile.TarInfo, pool: Executor
    ) -> Entry:
        if not 0 <= member.size <= MAX_BYTES - self._bytes:
            raise ValueError(f"{path!r} has {member.size} bytes, which is too large")
        content = cast(IO[bytes], archive.extractfile(member))
        writer = ChunkWriter(path, self._objects, pool if member.size > CHUNK_BYTES else None, self._known)
        for start in range(0, member.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, member.size - start)
            data = content.read(size)
            if len(data) != size:
                raise EOFError(f"it ends within {path!r}")
            writer.add(data)
        return replace(entry, size=member.size, chunks=writer.finish())
