"""Restore of captured files into a running container, unless its image has them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.program import run_program
from ares_exp.errors import RestoreError
from ares_exp.filesystem.delta import Delta, Entry, StoredChanges
from ares_exp.filesystem.layer import write_layer

_REMOVE = ["xargs", "-0", "rm", "-rf", "--"]
_LIKE_A_WHITEOUT = "/.wh."
_TOUCHED_BY_THE_ENGINE = "/etc"  # it creates hosts, hostname and others there


async def put_back(engine: Engine, container: str, changes: StoredChanges, *, is_derived: bool) -> None:
    """Applies `changes` to the files of a running container.

    Args:
        engine: The engine.
        container: The container's name.
        changes: Relative to its image.
        is_derived: Whether the image has them already, except files whose names mean deletions in a layer. Hard links
            are written anyway: what is written to one name of a file in a layer is not seen under the others.

    Raises:
        RestoreError: With the reason.
        SnapshotMetadataError: An object is missing or damaged.
    """
    entries = changes.delta.entries
    if is_derived:
        entries = _not_in_the_image(entries)
    elif gone := [path for path, entry in entries.items() if entry.kind == "whiteout" or entry.opaque]:
        await _remove(engine, container, gone)
    files = {path: replace(entry, opaque=False) for path, entry in entries.items() if entry.kind != "whiteout"}
    if files:
        plain = StoredChanges(Delta(changes.delta.base, files), changes.objects)
        await in_thread(lambda: _put(engine, container, plain), lane="transfers")


def _not_in_the_image(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries that a layer cannot hold, and their directories, whose times change with the writing."""
    found = {path for path, entry in entries.items() if _LIKE_A_WHITEOUT in path or entry.link is not None}
    found |= {path[:end] for path in found for end in range(1, len(path)) if path[end] == "/"}
    found.add(_TOUCHED_BY_THE_ENGINE)
    return {path: entry for path, entry in entries.items() if path in found}


async def _remove(engine: Engine, container: str, paths: list[str]) -> None:
    names = b"".join(os.fsencode(f".{path}\0") for path in paths)
    try:
        output, exit_code = await run_program(engine, container, _REMOVE, names, lambda file: file.read(1000))
    except engine_errors() as error:
        raise RestoreError(f"Deleted files cannot be removed in {container}: {reason(error)}.") from error
    if exit_code:
        raise RestoreError(
            f"Deleted files cannot be removed in {container}: `{' '.join(_REMOVE)}` ended there with exit code "
            f"{exit_code}. {output.decode('utf-8', 'replace').strip()}".rstrip()
        )


def _put(engine: Engine, container: str, changes: StoredChanges) -> None:
    with tempfile.TemporaryFile(prefix="ares_exp-changes-") as file:
        write_layer(changes, file, plain=True)
        file.seek(0)
        try:
            engine.api.put_archive(container, "/", file)
        except engine_errors() as error:
            raise RestoreError(f"The files could not be written to {container}: {reason(error)}.") from error
