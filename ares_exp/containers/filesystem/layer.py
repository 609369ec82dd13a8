"""A delta as a layer of an image: a tar archive in which names of a certain form mean deletions.

The format is https://github.com/opencontainers/image-spec/blob/main/layer.md: `.wh.<name>` for what is deleted,
`.wh..wh..opq` in a directory that hides the base's.
"""

from __future__ import annotations

import tarfile
from typing import Protocol

from ares_exp.containers.filesystem.delta import Entry, StoredChanges, contents, sorted_by_path
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_TYPES = {
    "file": tarfile.REGTYPE,
    "directory": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "fifo": tarfile.FIFOTYPE,
    "whiteout": tarfile.REGTYPE,
}


class Sink(Protocol):
    """What bytes can be written to, in order."""

    def write(self, data: bytes, /) -> object: ...


def write_layer(
    changes: StoredChanges, file: Sink, *, plain: bool = False, sparse: bool = False, pax: bool = True
) -> list[str]:
    """Writes the layer, uncompressed; the same changes always give the same bytes.

    Args:
        changes: What it holds.
        file: Where it goes.
        plain: Whether it is to be unpacked as it is, not as a layer: then any name can be in it, and there are to be
            no deletions and no opaque directories.
        sparse: Whether pieces of zeros are written as holes, for GNU tar.
        pax: Whether PAX headers are written: fractions of seconds and attributes. Without them, GNU's extensions are.

    Returns:
        A sentence for each thing that a layer cannot hold and that is left out: names that would mean a deletion, and
        attributes whose names are no text.

    Raises:
        SnapshotCorruptError: An object is missing or damaged. The archive is not whole then.
    """
    left_out: list[str] = []
    links: dict[int, str] = {}
    for path, entry in sorted_by_path(changes.delta.entries).items():
        if f"/{_WHITEOUT}" in path and not plain:
            left_out.append(f"{path!r} is left out: in a layer, its name means a deletion.")
            continue
        member = _member(path, entry, left_out)
        if entry.link is not None and (first := links.setdefault(entry.link, member.name)) != member.name:
            member.type, member.linkname = tarfile.LNKTYPE, first
        elif entry.kind == "file":
            member.size = entry.size
        is_sparse = sparse and bool(member.size) and None in entry.chunks
        if is_sparse:
            file.write(_sparse_header(member, entry))
        else:
            file.write(_header(member, pax=pax))
        if member.size:
            for part in contents(changes.objects, path, entry):
                if isinstance(part, bytes):
                    file.write(part)
                elif not is_sparse:
                    file.write(bytes(part))
            file.write(bytes(-member.size % tarfile.BLOCKSIZE))
        if entry.opaque:
            file.write(_header(tarfile.TarInfo(f"{member.name}/{_OPAQUE}"), pax=pax))
    file.write(bytes(2 * tarfile.BLOCKSIZE))
    return left_out


def _member(path: str, entry: Entry, left_out: list[str]) -> tarfile.TarInfo:
    directory, _, name = path[1:].rpartition("/")
    if entry.kind == "whiteout":
        path = f"/{directory}/{_WHITEOUT}{name}" if directory else f"/{_WHITEOUT}{name}"
    member = tarfile.TarInfo(path[1:])
    member.type, member.linkname = _TYPES[entry.kind], entry.target
    member.mode, member.uid, member.gid = entry.mode, entry.uid, entry.gid
    member.mtime, fraction = divmod(entry.mtime_ns, 10**9)
    headers: dict[str, str] = {}
    if fraction:
        sign, (seconds, fraction) = "-" * (entry.mtime_ns < 0), divmod(abs(entry.mtime_ns), 10**9)
        headers["mtime"] = f"{sign}{seconds}.{fraction:09}"
    for attribute, value in sorted(entry.xattrs.items()):
        if not attribute.isprintable() or "=" in attribute:
            left_out.append(f"The attribute {attribute!r} of {path!r} is left out: an archive cannot hold its name.")
            continue
        headers[f"SCHILY.xattr.{attribute}"] = value.decode("utf-8", "surrogateescape")
    member.pax_headers = headers
    return member


def _header(member: tarfile.TarInfo, *, pax: bool) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _sparse_header(member: tarfile.TarInfo, entry: Entry) -> bytes:
    """Returns a header with the map of a sparse file, format 1.0; sets the member's size to that of data and map.

    See https://www.gnu.org/software/tar/manual/html_node/PAX-1.html.
    """
    pieces: list[list[int]] = []
    for number, chunk in enumerate(entry.chunks):
        start = number * CHUNK_BYTES
        if chunk is not None:
            size = min(CHUNK_BYTES, entry.size - start)
            if pieces and sum(pieces[-1]) == start:
                pieces[-1][1] += size
            else:
                pieces.append([start, size])
    if not pieces or sum(pieces[-1]) < entry.size:
        pieces.append([entry.size, 0])
    data = "".join(
        f"{number}\n" for number in (len(pieces), *(number for piece in pieces for number in piece))
    ).encode()
    data += bytes(-len(data) % tarfile.BLOCKSIZE)
    member.pax_headers = {
        **member.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": member.name,
        "GNU.sparse.realsize": str(entry.size),
    }
    member.name = "GNUSparseFile.0/file"  # short: a header with a long one would win over the name above
    member.size = len(data) + sum(size for _, size in pieces)
    return _header(member, pax=True) + data
