"""Reader of tar archives from untrusted containers. An archive is read as a stream and never extracted."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import IO, Any, Self, cast

from ares_exp.containers.filesystem.delta import (
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_MTIME_NS,
    MAX_NAME_BYTES,
    MAX_PATH_BYTES,
    ChunkWriter,
    Entry,
    EntryKind,
    add_note,
    is_kept,
    is_kept_xattr,
    link_number,
    sorted_by_path,
)
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError
from ares_exp.records.secrets import KnownSecrets

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
    reader = _Reader(objects, notes, skip)
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


class _Reader:
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
