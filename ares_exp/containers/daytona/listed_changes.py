"""Bounded, checking parser for a sandbox's list of changed files, which its agent, root there, can forge."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, cast

from ares_exp.containers.filesystem.delta import MAX_MTIME_NS, MAX_PATH_BYTES, DeltaLimits
from ares_exp.errors import CaptureError

MAX_PACKED_BYTES = 2**28
"""Bound on the file of changes, as transferred."""

_MAX_LINE_BYTES = MAX_PATH_BYTES + 400
_END = b"."
_GZIP = b"\x1f\x8b"

_OF_FIND = re.compile(
    rb"(?P<kind>[a-zA-Z]) (?P<mode>[0-7]{1,5}) (?P<uid>\d{1,10}) (?P<gid>\d{1,10}) (?P<size>\d{1,19}) "
    rb"(?P<sec>-?\d{1,15})\.(?P<nsec>\d{9})\d* (?P<changed>-?\d{1,15})\.\d+ (?P<file>\d+ \d+) (?P<names>\d+) "
)
_DATE = rb"-?\d+-\d\d-\d\d \d\d:\d\d:\d\d"
_OF_STAT = re.compile(
    rb"(?P<raw>[0-9a-f]{1,8}) (?P<uid>\d{1,10}) (?P<gid>\d{1,10}) (?P<size>\d{1,19}) "
    rb"(?P<sec>-?\d{1,15}) " + _DATE + rb"(?:\.(?P<nsec>\d{9}))? \+0000 "
    rb"(?P<changed>-?\d{1,15}) " + _DATE + rb"(?:\.\d+)? \+0000 (?P<file>\d+ \d+) (?P<names>\d+) "
)
_KINDS = {0o100000: "f", 0o040000: "d", 0o120000: "l", 0o010000: "p", 0o140000: "s", 0o060000: "b", 0o020000: "c"}
_SWAPPED = bytes.maketrans(b"\0\n", b"\n\0")
_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Listed:
    """One path of a listing.

    Attributes:
        signature: Its line without the path; any change changes it.
        kind: As in `find`: `f`, `d`, `l`, `p`, `s`, `b`, `c`.
        mode, uid, gid, size, mtime_ns: As in the file system; the size of a directory is 0.
        changed_sec: Its ctime, by the sandbox's clock.
        file: Equal for all names of one file; `None`: it has one name.
    """

    signature: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    changed_sec: int
    file: bytes | None


@dataclass(slots=True)
class Changes:
    """The differences from the first listing.

    Attributes:
        now: New and changed paths.
        before: Changed and removed paths.
        mounts: The mount points.
    """

    now: dict[str, Listed] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)


def read_changes(file: IO[bytes], style: str, limits: DeltaLimits) -> Changes:
    """Parses the file made by a `compare_script`. Blocking.

    Args:
        file: Positioned at its start.
        style: The program that made the lines.
        limits: The bounds.

    Raises:
        CaptureError: It is malformed, incomplete or too long.
    """
    changes, pattern = Changes(), _OF_FIND if style == "find" else _OF_STAT
    try:
        lines = _lines(_plain(file), 2 * limits.max_entries)
        for line in _section(lines):
            path, found = _parsed(line, pattern)
            changes.now[path] = found
        for line in _section(lines):
            changes.before.add(_parsed(line, pattern)[0])
        for line in _section(lines):
            changes.mounts.add(os.fsdecode(_ESCAPED.sub(lambda octal: bytes([int(octal[1], 8) & 255]), line)))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CaptureError(f"The list of the sandbox's changed files cannot be read: {error}.") from None
    return changes


def _plain(file: IO[bytes]) -> IO[bytes]:
    is_compressed = file.read(len(_GZIP)) == _GZIP
    file.seek(0)
    return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb")) if is_compressed else file


def _lines(file: IO[bytes], most: int) -> Iterator[bytes]:
    for _ in range(most):
        line = file.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("it ends early, or a line in it is too long")
        yield line[:-1]
    raise ValueError(f"it has more than {most} lines")


def _section(lines: Iterator[bytes]) -> Iterator[bytes]:
    for line in lines:
        if line == _END:
            return
        yield line


def _parsed(line: bytes, pattern: re.Pattern[bytes]) -> tuple[str, Listed]:
    line = line.translate(_SWAPPED)
    found = pattern.match(line)
    if found is None or not line.startswith(b"/", found.end()):
        raise ValueError(f"{line[:200]!r} is no line of it")
    path, parts = os.fsdecode(line[found.end() :]), found.groupdict()
    if ".." in path.split("/"):
        raise ValueError(f"{path!r} is no path of a listing")
    raw = int(parts["raw"], 16) if "raw" in parts else int(parts["mode"], 8)
    mtime_ns = int(parts["sec"]) * 10**9 + int(parts["nsec"] or 0)
    return path, Listed(
        signature=found[0],
        kind=_KINDS.get(raw & 0o170000, "?") if "raw" in parts else parts["kind"].decode(),
        mode=raw & 0o7777,
        uid=int(parts["uid"]),
        gid=int(parts["gid"]),
        size=int(parts["size"]),
        mtime_ns=max(-MAX_MTIME_NS, min(MAX_MTIME_NS, mtime_ns)),
        changed_sec=int(parts["changed"]),
        file=parts["file"] if int(parts["names"]) > 1 else None,
    )
