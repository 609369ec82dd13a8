"""Checks of one entry of a delta that comes from an untrusted snapshot."""

from __future__ import annotations

import os
import re
from typing import Any, NoReturn, get_args

from ares_exp.containers.filesystem.delta import (
    MAX_MTIME_NS,
    MAX_NAME_BYTES,
    MAX_PATH_BYTES,
    EntryKind,
    is_kept,
    is_kept_xattr,
)
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES
from ares_exp.errors import SnapshotMetadataError, UnsafeSnapshotError

_MAX_XATTR_BYTES = 64 * 1024  # what the kernel allows for one
_MAX_ID = 2**32 - 2  # to chown, 2**32 - 1 means to leave it
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KINDS = frozenset(get_args(EntryKind))
_FIELDS: dict[str, set[str]] = {
    "file": {"mode", "uid", "gid", "mtime_ns", "size", "chunks", "xattrs", "link"},
    "directory": {"mode", "uid", "gid", "mtime_ns", "xattrs", "opaque"},
    "symlink": {"uid", "gid", "mtime_ns", "target"},
    "fifo": {"mode", "uid", "gid", "mtime_ns"},
    "whiteout": set(),
}
_INTEGERS = {
    "mode": (0, 0o7777),
    "uid": (0, _MAX_ID),
    "gid": (0, _MAX_ID),
    "mtime_ns": (-MAX_MTIME_NS, MAX_MTIME_NS),
    "link": (0, 2**63 - 1),
}


def malformed(what: str, *found: object) -> NoReturn:
    """Refuses what this package does not write."""
    raise SnapshotMetadataError(f"{what}: {str(found[0])[:200]!r}." if found else f"{what}.")


def unsafe(what: str, value: object) -> NoReturn:
    """Refuses what must not be used."""
    raise UnsafeSnapshotError(f"{what}: {str(value)[:200]!r}.")


def checked_entry(value: Any, room: int) -> dict[str, Any]:
    """Checks each field of one entry by itself and returns it.

    Args:
        value: Anything that JSON has. Changed in place.
        room: How large a file may be, in bytes.

    Raises:
        SnapshotMetadataError: It is none.
        UnsafeSnapshotError: It is one that no capture gives.
    """
    if not isinstance(value, dict):
        malformed("expected an entry, found", value)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        if kind in ("character", "block", "socket"):
            unsafe("devices and sockets are refused, found a", kind)
        malformed(f"expected a kind of {', '.join(sorted(_KINDS))}, found", kind)
    if unknown := value.keys() - _FIELDS[kind] - {"path", "kind"}:
        malformed(f"a {kind} has no such field", sorted(unknown)[0])
    for name, (lowest, highest) in {**_INTEGERS, "size": (0, room)}.items():
        if name in value:
            _check_integer(name, value[name], lowest, highest)
    if not isinstance(value.get("opaque", False), bool):
        malformed("expected opaque to be true or false, found", value["opaque"])
    value["path"] = _path(value.get("path"))
    if kind == "symlink":
        value["target"] = _target(value.get("target"))
    if "xattrs" in value:
        value["xattrs"] = _xattrs(value["xattrs"])
    if "chunks" in value:
        value["chunks"] = checked_chunks(value["chunks"], value.get("size", 0))
    return value


def _check_integer(name: str, value: Any, lowest: int, highest: int) -> None:
    if type(value) is not int:
        malformed(f"expected {name} to be a whole number, found", value)
    if not lowest <= value <= highest:
        # No more than its digits that fit a line: it may have thousands.
        raise UnsafeSnapshotError(f"expected {name} to be from {lowest} to {highest}, found another number.")


def _bytes(text: Any, what: str) -> bytes:
    """Returns the bytes of a name; one spelling only, or the same file could have two entries."""
    if not isinstance(text, str):
        malformed(f"expected {what}, found", text)
    try:
        data = os.fsencode(text)
    except UnicodeError:
        malformed(f"expected {what}, found what is none", ascii(text))
    if os.fsdecode(data) != text:
        malformed(f"expected {what}, found another spelling of one", ascii(text))
    return data


def _path(path: Any) -> str:
    data = _bytes(path, "a path")
    names = data.split(b"/")
    if names[0] or not all(names[1:]) or b"." in names or b".." in names or b"\0" in data or len(names) < 2:
        unsafe("expected an absolute path with neither . nor .. in it, found", ascii(path))
    if len(data) > MAX_PATH_BYTES or max(map(len, names)) > MAX_NAME_BYTES:
        unsafe("expected a path that fits a file system, found", ascii(path))
    if not is_kept(path):
        unsafe("nothing in /dev, /proc or /sys may be changed, found", ascii(path))
    return str(path)


def _target(target: Any) -> str:
    data = _bytes(target, "where a link points")
    if not data or b"\0" in data or len(data) > MAX_PATH_BYTES:
        unsafe("expected a link that fits a file system, found", ascii(target))
    return str(target)


def _xattrs(value: Any) -> dict[str, bytes]:
    if not isinstance(value, dict):
        malformed("expected attributes by their names, found", value)
    attributes = {}
    for name, text in value.items():
        if (
            b"\0" in (data := _bytes(name, "an attribute's name"))
            or len(data) > MAX_NAME_BYTES
            or not is_kept_xattr(name)
        ):
            unsafe("expected attributes user.* and security.capability alone, found", ascii(name))
        try:
            attributes[name] = bytes.fromhex(text)
        except (TypeError, ValueError):
            malformed("expected an attribute in hexadecimal digits, found", text)
    if sum(map(len, attributes.values())) > _MAX_XATTR_BYTES:
        unsafe(f"expected at most {_MAX_XATTR_BYTES} bytes of attributes, found more", list(attributes))
    return attributes


def checked_chunks(value: Any, size: int) -> tuple[str | None, ...]:
    """Returns the chunks of `size` bytes at most, zeros spelled out."""
    if not isinstance(value, list):
        malformed("expected a list of chunks, found", value)
    chunks: list[str | None] = []
    most = -(-size // CHUNK_BYTES)
    for chunk in value:
        if isinstance(chunk, str):
            if not _DIGEST.fullmatch(chunk):
                malformed("expected the sha256 of a chunk, found", chunk)
            chunks.append(chunk)
        else:
            _check_integer("a number of pieces of zeros", chunk, 1, most - len(chunks))
            chunks += [None] * chunk
    if len(chunks) > most:
        raise UnsafeSnapshotError("expected no more chunks than the size of the file needs, found more.")
    return tuple(chunks)
