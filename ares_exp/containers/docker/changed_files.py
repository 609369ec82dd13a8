"""Restoring captured files in a new container: finding the image of the capture, and writing the changed files."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.container_lifetime import why_it_stays
from ares_exp.containers.docker.engine import Engine, connection_failure, engine_errors, in_thread, reason
from ares_exp.containers.docker.image import ensure_image, inspect_image
from ares_exp.containers.docker.stream import run_program
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, contents, sorted_by_path
from ares_exp.errors import ContainerStartError, RestoreError, SnapshotMismatchError, TaskError

_REMEDY = (
    "Copy the image to this engine (`docker save` on a machine that has it, `docker load` here), or start the task "
    "again. For runs with snapshots, set container.keep_image=true and keep their images on the engine."
)
_REMOVE = ["xargs", "-0", "rm", "-rf", "--"]


async def find_base(engine: Engine, spec: ContainerSpec, *, keep: bool) -> dict[str, Any]:
    """Returns the engine's description of the base image, to which `spec.changes` must be applied.

    If the engine does not have the image, the task's image is pulled or built. Raises `SnapshotMismatchError` if that
    fails, or if its id differs from the id of the base image.
    """
    assert spec.changes is not None
    base = spec.changes.delta.base
    if not base.startswith("sha256:"):
        raise SnapshotMismatchError(
            f"The snapshot of {spec.name} contains changes to {base}, not to a Docker image (sha256:…). Restore it "
            "with the backend that captured it."
        )
    found = await in_thread(lambda: inspect_image(engine.api, base), abandon=True)
    if found is not None:
        return found
    what = f"The snapshot of {spec.name} contains changes to the image {base}, which the engine does not have"
    try:
        image = await ensure_image(
            engine, name=spec.name, docker_image=spec.docker_image, context_dir=spec.context_dir, keep=keep
        )
    except (ContainerStartError, TaskError) as error:
        raise SnapshotMismatchError(f"{what}. The task's image cannot be used instead: {error} {_REMEDY}") from error
    found = await in_thread(lambda: inspect_image(engine.api, image), abandon=True)
    if found is not None and found["Id"] == base:
        return found
    if spec.docker_image is None and not keep:
        await in_thread(lambda: why_it_stays(lambda: engine.api.remove_image(image)), pool="removals")
    other = found["Id"] if found is not None else "gone"
    raise SnapshotMismatchError(f"{what}. The task's image {image} differs: it is now {other}. {_REMEDY}")


def name_of(image: dict[str, Any], spec: ContainerSpec) -> str:
    """Returns the task's name for an image if it still refers to this image. Otherwise, returns another name or id."""
    names: list[str] = image.get("RepoTags") or [image["Id"]]
    return spec.docker_image if spec.docker_image in names else names[0]


async def put_back(engine: Engine, container: str, changes: StoredChanges) -> None:
    """Deletes and writes files in a running container of the base image, so that it has the captured files.

    Raises `RestoreError` if that fails, and `SnapshotMetadataError` if a stored object is missing or damaged.
    """
    entries = changes.delta.entries
    gone = [path for path, entry in entries.items() if entry.kind == "whiteout" or entry.opaque]
    files = {path: replace(entry, opaque=False) for path, entry in entries.items() if entry.kind != "whiteout"}
    plain = StoredChanges(Delta(changes.delta.base, files), changes.objects)
    try:
        if gone:
            await _remove(engine, container, gone)
        if files:
            await in_thread(lambda: engine.api.put_archive(container, "/", archive(plain)), pool="transfers")
    except engine_errors() as error:
        if connection_failure(error) is not None:
            raise
        raise RestoreError(f"The snapshot's files could not be restored in {container}: {reason(error)}.") from error


async def _remove(engine: Engine, container: str, paths: list[str]) -> None:
    names = b"".join(os.fsencode(f".{path}\0") for path in paths)
    output, exit_code = await run_program(engine, container, _REMOVE, names, lambda file: file.read(1000))
    if exit_code:
        raise RestoreError(
            f"Deleted files could not be removed from {container}: `{' '.join(_REMOVE)}` ended with exit code "
            f"{exit_code}. {output.decode('utf-8', 'replace').strip()}".rstrip()
        )


_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "fifo": tarfile.FIFOTYPE}


def archive(changes: StoredChanges) -> Iterator[bytes]:
    """Yields a tar archive of all changes except deletions. Raises `SnapshotCorruptError` for a damaged object."""
    links: dict[int, str] = {}
    for path, entry in sorted_by_path(changes.delta.entries).items():
        member = _member(path, entry)
        if entry.link is not None and (first := links.setdefault(entry.link, member.name)) != member.name:
            member.type, member.linkname = tarfile.LNKTYPE, first
        elif entry.kind == "file":
            member.size = entry.size
        yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if member.size:
            yield from (
                part if isinstance(part, bytes) else bytes(part) for part in contents(changes.objects, path, entry)
            )
            yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(path: str, entry: Entry) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path[1:])
    member.type, member.linkname = _TYPES[entry.kind], entry.target
    member.mode, member.uid, member.gid = entry.mode, entry.uid, entry.gid
    member.mtime, fraction = divmod(entry.mtime_ns, 10**9)
    headers = dict[str, str]()
    if fraction:
        sign, (seconds, fraction) = "-" * (entry.mtime_ns < 0), divmod(abs(entry.mtime_ns), 10**9)
        headers["mtime"] = f"{sign}{seconds}.{fraction:09}"
    for attribute, value in sorted(entry.xattrs.items()):
        if attribute.isprintable() and "=" not in attribute:  # other names cannot be stored in an archive
            headers[f"SCHILY.xattr.{attribute}"] = value.decode("utf-8", "surrogateescape")
    member.pax_headers = headers
    return member
