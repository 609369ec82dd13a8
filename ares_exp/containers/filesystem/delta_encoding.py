r"""Deltas as lines of JSON, and back. Lines are untrusted: they are checked before use.

The first line is `{"version": 1, "base": …, "notes": […]}`. Then each entry has one line, with its path and what
differs from the defaults of `Entry`; xattrs are hexadecimal. Chunks are digests, or the number of pieces of zeros that
follow each other. A file of many chunks continues in lines that are lists, so that changing a page of a large file
changes few objects. Bytes of a name that are no UTF-8 are lone surrogates (`\udc80` to `\udcff`), as Python has them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from ares_exp.containers.filesystem.delta import Delta, DeltaLimits, Entry, link_number, sorted_by_path
from ares_exp.containers.filesystem.entry_checks import checked_chunks, checked_entry, malformed, unsafe
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import SnapshotMetadataError, SnapshotVersionError, UnsafeSnapshotError

_VERSION = 1
_CHUNKS_PER_LINE = 256
_CUT = 128  # an object ends after one line in so many
_MAX_NOTE = 2000
_BASE = re.compile(r"[a-z0-9]+:[\x21-\x7e]{1,500}")
_DEFAULTS = Entry(kind="file")


def put_delta(delta: Delta, objects: ObjectStore) -> tuple[str, ...]:
    """Stores a delta. One that is like a stored one shares most of its objects.

    Returns:
        The digests, for `get_delta`.

    Raises:
        CaptureError: A name, a link or an attribute holds the value of a known secret.
    """
    return objects.put_lines(encode(delta), cut_after=_ends_object)


def get_delta(objects: ObjectStore, digests: Sequence[str], *, limits: DeltaLimits | None = None) -> Delta:
    """Returns the delta that `put_delta` stored.

    Raises:
        SnapshotMetadataError: As `decode`; `SnapshotCorruptError` for a missing or damaged object.
    """
    return decode(objects.get_lines(digests), limits=limits)


def encode(delta: Delta) -> Iterator[bytes]:
    """Yields the lines of a delta, without line ends; the same delta always has the same lines."""
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


def decode(lines: Iterable[bytes], *, limits: DeltaLimits | None = None) -> Delta:
    """Returns the delta of these lines.

    Raises:
        SnapshotMetadataError: They are not what `encode` writes; `SnapshotVersionError` for a newer version.
        UnsafeSnapshotError: They are, and must not be used: a path that leads out, a name for an entry below a link, a
            mode, owner or attribute that no capture gives, more than `limits` allows.
    """
    limits, number, size = limits or DeltaLimits(), 0, 0
    entries: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    base = ""
    notes: tuple[str, ...] = ()
    try:
        for number, line in enumerate(lines, start=1):
            value = _parsed(line)
            if number == 1:
                base, notes = _header(value, limits)
            elif isinstance(value, list):
                if not last.get("chunks"):
                    malformed("expected an entry, found more chunks", value)
                last["chunks"] += checked_chunks(value, last["size"] - len(last["chunks"]) * CHUNK_BYTES)
            else:
                last = checked_entry(value, limits.max_bytes - size)
                size += last.get("size", 0)
                _add(entries, last, limits)
        if number == 0:
            malformed("expected a first line, found none")
        number = 0
        built = {path: _entry(path, values) for path, values in entries.items()}
        _check_links(built)
    except SnapshotMetadataError as error:
        place = f" (line {number})" if number else ""
        raise type(error)(f"The list of changed files cannot be used{place}: {error}") from None
    return Delta(base=base, entries=built, notes=notes)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _ends_object(line: bytes) -> bool:
    """Returns whether an object of lines ends here. The path alone decides, so a changed entry moves no border."""
    if line.startswith(b'{"path":'):
        return zlib.crc32(line[8 : line.find(b',"kind":')]) % _CUT == 0
    return True  # the first line, and each line of chunks


def _runs(chunks: Iterable[str | None]) -> Iterator[str | int]:
    for chunk, group in groupby(chunks):
        if chunk is None:
            yield sum(1 for _ in group)
        else:
            yield from (chunk for _ in group)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        malformed("expected JSON, found something else", line[:100])


def _header(value: Any, limits: DeltaLimits) -> tuple[str, tuple[str, ...]]:
    if not isinstance(value, dict) or not isinstance(version := value.get("version"), int):
        malformed("expected a first line with a version, found", value)
    if version != _VERSION:
        raise SnapshotVersionError(
            f"expected version {_VERSION}, found {version!s:.20}. Read it with the ares_exp that wrote it."
        )
    base, notes = value.get("base"), value.get("notes")
    if not isinstance(base, str) or not _BASE.fullmatch(base):
        malformed("expected a base such as sha256:…, found", base)
    if not isinstance(notes, list) or len(notes) > limits.max_notes or not all(isinstance(note, str) for note in notes):
        malformed(f"expected at most {limits.max_notes} notes, each a text, found", notes)
    return base, tuple(note[:_MAX_NOTE] for note in notes)


def _add(entries: dict[str, dict[str, Any]], values: dict[str, Any], limits: DeltaLimits) -> None:
    path = values["path"]
    if path in entries:
        unsafe("expected each path once, found again", ascii(path))
    if len(entries) >= limits.max_entries:
        raise UnsafeSnapshotError(f"expected at most {limits.max_entries} entries, found more.")
    parent = path.rpartition("/")[0]
    if parent and parent not in entries:
        unsafe("expected the directory of a path before it, found alone", ascii(path))
    if parent and entries[parent]["kind"] != "directory":
        unsafe("expected an entry to be in a directory, found one below something else", ascii(path))
    entries[path] = values


def _entry(path: str, values: dict[str, Any]) -> Entry:
    size, chunks = values.get("size", 0), values.get("chunks", ())
    if len(chunks) != -(-size // CHUNK_BYTES):
        unsafe(f"expected {-(-size // CHUNK_BYTES)} chunks for {size} bytes, found {len(chunks)} in", ascii(path))
    return Entry(**{name: value for name, value in values.items() if name != "path"})


def _check_links(entries: Mapping[str, Entry]) -> None:
    groups: dict[int, Entry] = {}
    for path, entry in entries.items():
        if entry.link is not None and groups.setdefault(entry.link, entry) != entry:
            unsafe("expected the names of one file to agree in everything, found another one", ascii(path))
