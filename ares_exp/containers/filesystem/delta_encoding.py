r"""Encoding of deltas as lines of JSON. Decoding treats the lines as untrusted, and checks every entry.

The first line is `{"version": 1, "base": …, "notes": […]}`. Then each entry has one line, with its path and the fields
that differ from the defaults of `Entry`. Values of extended attributes are hexadecimal. In a list of chunks, a string
is the digest of a chunk, and a number stands for that many consecutive chunks of zeros. If a file has many chunks, the
following lines contain the rest of the list. So if a part of a large file changes, only a few stored objects change.
Bytes of a name that are not UTF-8 become lone surrogates (`\udc80` to `\udcff`), as in Python.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NoReturn, get_args

from ares_exp.containers.filesystem.delta import (
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_MTIME_NS,
    MAX_NAME_BYTES,
    MAX_NOTES,
    MAX_PATH_BYTES,
    Delta,
    Entry,
    EntryKind,
    is_kept,
    is_kept_xattr,
    link_number,
    sorted_by_path,
)
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, DIGEST, ObjectStore
from ares_exp.errors import SnapshotMetadataError, SnapshotVersionError, UnsafeSnapshotError

_MAX_XATTR_BYTES = 64 * 1024  # the kernel's limit for one attribute
_MAX_ID = 2**32 - 2  # chown uses 2**32 - 1 for "unchanged"
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
    """Raises `SnapshotMetadataError` for data that `encode` never writes."""
    raise SnapshotMetadataError(f"{what}: {str(found[0])[:200]!r}." if found else f"{what}.")


def unsafe(what: str, value: object) -> NoReturn:
    """Raises `UnsafeSnapshotError` for data that is well-formed but unsafe to use."""
    raise UnsafeSnapshotError(f"{what}: {str(value)[:200]!r}.")


def checked_entry(value: Any, room: int) -> dict[str, Any]:
    """Checks all fields of one parsed entry, and returns the entry. `room` is the maximum size of a file in bytes.

    Raises `SnapshotMetadataError` if the value is not an entry, and `UnsafeSnapshotError` if a capture would never
    produce the entry.
    """
    if not isinstance(value, dict):
        malformed("expected an entry, found", value)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        if kind in ("character", "block", "socket"):
            unsafe("devices and sockets are not supported, found", kind)
        malformed(f"expected kind to be one of {', '.join(sorted(_KINDS))}, found", kind)
    if unknown := value.keys() - _FIELDS[kind] - {"path", "kind"}:
        malformed(f"a {kind} has no such field", sorted(unknown)[0])
    for name, (lowest, highest) in {**_INTEGERS, "size": (0, room)}.items():
        if name in value:
            _check_integer(name, value[name], lowest, highest)
    if not isinstance(value.get("opaque", False), bool):
        malformed("expected opaque to be true or false, found", value["opaque"])
    _check_path(value.get("path"))
    if kind == "symlink":
        data = _bytes(value.get("target"), "the target of a link")
        if not data or b"\0" in data or len(data) > MAX_PATH_BYTES:
            unsafe("expected a link target that file systems allow, found", ascii(value["target"]))
    if "xattrs" in value:
        value["xattrs"] = _xattrs(value["xattrs"])
    if "chunks" in value:
        value["chunks"] = checked_chunks(value["chunks"], value.get("size", 0))
    return value


def _check_integer(name: str, value: Any, lowest: int, highest: int) -> None:
    if type(value) is not int:
        malformed(f"expected {name} to be a whole number, found", value)
    if not lowest <= value <= highest:
        # The message omits the number, which may have thousands of digits.
        raise UnsafeSnapshotError(f"expected {name} to be from {lowest} to {highest}, found another number.")


def _bytes(text: Any, what: str) -> bytes:
    """Encodes a name as bytes. Rejects non-canonical text, because a file could then have two entries."""
    if not isinstance(text, str):
        malformed(f"expected {what}, found", text)
    try:
        data = os.fsencode(text)
    except UnicodeError:
        malformed(f"expected {what}, found invalid text", ascii(text))
    if os.fsdecode(data) != text:
        malformed(f"expected {what}, found a non-canonical encoding", ascii(text))
    return data


def _check_path(path: Any) -> None:
    data = _bytes(path, "a path")
    names = data.split(b"/")
    if names[0] or not all(names[1:]) or b"." in names or b".." in names or b"\0" in data or len(names) < 2:
        unsafe("expected an absolute path without the names . and .., found", ascii(path))
    if len(data) > MAX_PATH_BYTES or max(map(len, names)) > MAX_NAME_BYTES:
        unsafe("expected a path that file systems allow, found", ascii(path))
    if not is_kept(path):
        unsafe("expected no path in /dev, /proc or /sys, found", ascii(path))


def _xattrs(value: Any) -> dict[str, bytes]:
    if not isinstance(value, dict):
        malformed("expected an object of attributes, found", value)
    attributes = {}
    for name, text in value.items():
        if (
            b"\0" in (data := _bytes(name, "an attribute's name"))
            or len(data) > MAX_NAME_BYTES
            or not is_kept_xattr(name)
        ):
            unsafe("expected only the attributes user.* and security.capability, found", ascii(name))
        try:
            attributes[name] = bytes.fromhex(text)
        except (TypeError, ValueError):
            malformed("expected an attribute in hexadecimal digits, found", text)
    if sum(map(len, attributes.values())) > _MAX_XATTR_BYTES:
        unsafe(f"expected at most {_MAX_XATTR_BYTES} bytes of attributes per file, found more for", list(attributes))
    return attributes


def checked_chunks(value: Any, size: int) -> tuple[str | None, ...]:
    """Returns the checked chunks of a file of `size` bytes. Each chunk of zeros becomes one `None`."""
    if not isinstance(value, list):
        malformed("expected a list of chunks, found", value)
    chunks: list[str | None] = []
    most = -(-size // CHUNK_BYTES)
    for chunk in value:
        if isinstance(chunk, str):
            if not DIGEST.fullmatch(chunk):
                malformed("expected the sha256 of a chunk, found", chunk)
            chunks.append(chunk)
        else:
            _check_integer("a number of chunks of zeros", chunk, 1, most - len(chunks))
            chunks += [None] * chunk
    if len(chunks) > most:
        raise UnsafeSnapshotError("a file has more chunks than its size allows.")
    return tuple(chunks)


_VERSION = 1
_CHUNKS_PER_LINE = 256
_CUT = 128  # on average, an object ends after this number of lines
_MAX_NOTE = 2000
_BASE = re.compile(r"[a-z0-9]+:[\x21-\x7e]{1,500}")
_DEFAULTS = Entry(kind="file")


def put_delta(delta: Delta, objects: ObjectStore) -> tuple[str, ...]:
    """Stores a delta, and returns the digests to pass to `get_delta`. Similar deltas share most of their objects.

    Raises `CaptureError` if a name, a link or an attribute contains a known secret.
    """
    return objects.put_lines(encode(delta), cut_after=_ends_object)


def get_delta(objects: ObjectStore, digests: Sequence[str]) -> Delta:
    """Loads a delta that was stored with `put_delta`. Raises the errors of `decode` and `ObjectStore.get_lines`."""
    return decode(objects.get_lines(digests))


def encode(delta: Delta) -> Iterator[bytes]:
    """Yields the lines that encode a delta, without line breaks. Equal deltas have equal lines."""
    yield _json({"version": _VERSION, "base": delta.base, "notes": list(delta.notes)})
    links: dict[int, int] = {}
    for path, entry in sorted_by_path(delta.entries).items():
        values: dict[str, Any] = {"path": path, "kind": entry.kind}
        for name in ("mode", "uid", "gid", "mtime_ns", "size", "target", "opaque"):
            if (value := getattr(entry, name)) != getattr(_DEFAULTS, name):
                values[name] = value
        if entry.link is not None:
            values["link"] = links.setdefault(entry.link, link_number(path))
        if entry.xattrs:
            values["xattrs"] = {name: value.hex() for name, value in sorted(entry.xattrs.items())}
        if not entry.chunks:
            yield _json(values)
            continue
        chunks = _runs(entry.chunks)
        yield _json({**values, "chunks": list(islice(chunks, _CHUNKS_PER_LINE))})
        while more := list(islice(chunks, _CHUNKS_PER_LINE)):
            yield _json(more)


def decode(lines: Iterable[bytes]) -> Delta:
    """Parses lines from `encode`, and returns the delta.

    Raises:
        SnapshotMetadataError: The lines are malformed. For an encoding with another version, this is a
            `SnapshotVersionError`.
        UnsafeSnapshotError: The lines are well-formed but unsafe, for example because of a path with `..`, an entry
            below a link, an attribute that no capture produces, or too much data.
    """
    number = size = 0
    entries: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    base = ""
    notes: tuple[str, ...] = ()
    try:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                malformed("expected JSON, found", line[:100])
            if number == 1:
                base, notes = _header(value)
            elif isinstance(value, list):
                if not last.get("chunks"):
                    malformed("expected an entry before its list of chunks, found", value)
                last["chunks"] += checked_chunks(value, last["size"] - len(last["chunks"]) * CHUNK_BYTES)
            else:
                last = checked_entry(value, MAX_BYTES - size)
                size += last.get("size", 0)
                _add(entries, last)
        if number == 0:
            malformed("expected a first line, found none")
        number = 0
        built = {path: _entry(path, values) for path, values in entries.items()}
        links: dict[int, Entry] = {}
        for path, entry in built.items():
            if entry.link is not None and links.setdefault(entry.link, entry) != entry:
                unsafe("expected the same entry for all hard links of a file, found another entry for", ascii(path))
    except SnapshotMetadataError as error:
        place = f" (line {number})" if number else ""
        raise type(error)(f"The list of changed files cannot be used{place}: {error}") from None
    return Delta(base=base, entries=built, notes=notes)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _ends_object(line: bytes) -> bool:
    """Returns whether `put_lines` must end a stored object after this line.

    For an entry, this depends only on the path. So a change of another field changes only the object with that entry.
    """
    # The first line, and each line of chunks, is a separate object.
    return not line.startswith(b'{"path":') or zlib.crc32(line[8 : line.find(b',"kind":')]) % _CUT == 0


def _runs(chunks: Iterable[str | None]) -> Iterator[str | int]:
    for chunk, group in groupby(chunks):
        if chunk is None:
            yield sum(1 for _ in group)
        else:
            yield from (chunk for _ in group)


def _header(value: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(value, dict) or not isinstance(version := value.get("version"), int):
        malformed("expected a first line with a version, found", value)
    if version != _VERSION:
        raise SnapshotVersionError(
            f"expected version {_VERSION}, found {version!s:.20}. Use the version of ares_exp that wrote the snapshot."
        )
    base, notes = value.get("base"), value.get("notes")
    if not isinstance(base, str) or not _BASE.fullmatch(base):
        malformed("expected a base such as sha256:…, found", base)
    if not isinstance(notes, list) or len(notes) > MAX_NOTES or not all(isinstance(note, str) for note in notes):
        malformed(f"expected at most {MAX_NOTES} notes that are strings, found", notes)
    return base, tuple(note[:_MAX_NOTE] for note in notes)


def _add(entries: dict[str, dict[str, Any]], values: dict[str, Any]) -> None:
    path = values["path"]
    if path in entries:
        unsafe("expected one entry per path, found a second entry for", ascii(path))
    if len(entries) >= MAX_ENTRIES:
        raise UnsafeSnapshotError(f"there are more than {MAX_ENTRIES} entries.")
    parent = path.rpartition("/")[0]
    if parent and parent not in entries:
        unsafe("expected an earlier entry for the parent directory of", ascii(path))
    if parent and entries[parent]["kind"] != "directory":
        unsafe("the parent of this path is not a directory", ascii(path))
    entries[path] = values


def _entry(path: str, values: dict[str, Any]) -> Entry:
    size, chunks = values.get("size", 0), values.get("chunks", ())
    if len(chunks) != -(-size // CHUNK_BYTES):
        unsafe(f"expected {-(-size // CHUNK_BYTES)} chunks for {size} bytes, found {len(chunks)} for", ascii(path))
    return Entry(**{name: value for name, value in values.items() if name != "path"})
