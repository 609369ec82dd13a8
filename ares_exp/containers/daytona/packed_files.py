"""Reading of a sandbox's files: its `tar` packs them into one file, which is fetched and read as a stream."""

from __future__ import annotations

import gzip
import io
import os
import re
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from ares_exp.containers.bounded_reading import Skip, bounded
from ares_exp.containers.daytona.file_listing import DIRECTORY, PRELUDE, UNREADABLE
from ares_exp.containers.daytona.sandbox_scripts import SandboxScripts
from ares_exp.containers.filesystem.delta import DeltaLimits, Entry
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.filesystem.tar_entries import GNU_CREATE, READ_SOMETHING, read_tar
from ares_exp.errors import CaptureError

_LARGE_BYTES = 16 * 2**20
_MORE_BYTES = 2**28  # headers, and compression overhead
_NAMES, _PACKED = f"{DIRECTORY}/names", f"{DIRECTORY}/packed"

# Tars other than GNU's get names as arguments, in batches, each of which makes another archive.
_PACK = (
    PRELUDE
    + f"""\
rm -f "$d"/part.*; echo 1000000 >"$d/count"; : >"$d/codes"; : >"$d/errors"
case $(tar --version 2>&1) in *GNU*) tar=gnu;; *) tar=other;; esac
{{
    if [ $tar = gnu ]; then
        tar {shlex.join(GNU_CREATE)} --files-from="$d/names" -f - 2>"$d/errors"; echo $? >"$d/codes"
    else
        xargs -0 sh -c '
            read -r number <"$0/count"; echo $((number + 1)) >"$0/count"
            tar -c -f "$0/part.$number" --no-recursion "$@" 2>>"$0/errors"; echo $? >>"$0/codes"
        ' "$d" <"$d/names"
        cat "$d"/part.*
    fi
}} | $z >"$d/packed" || exit {UNREADABLE}
while read -r code; do
    if [ "$code" -gt {max(READ_SOMETHING)} ]; then
        read -r line <"$d/errors"; printf '%.400s\\n' "$line"; exit {UNREADABLE}
    fi
done <"$d/codes"
echo "$tar $(($(wc -c <"$d/packed")))"
if [ $tar = other ]; then for part in "$d"/part.*; do echo $(($(wc -c <"$part"))); done; rm -f "$d"/part.*; fi
"""
)
_SAID = re.compile(r"(gnu|other) ([0-9]{1,15})\n((?:[0-9]{1,15}\n)*)")
_NO_GNU_TAR = (
    "There is no GNU tar in the sandbox; the one that is there keeps no attributes, no fractions of seconds, and no "
    "times and owners of links."
)


async def read_files(
    scripts: SandboxScripts,
    paths: Sequence[str],
    objects: ObjectStore,
    notes: list[str],
    skip: Skip,
    limits: DeltaLimits,
) -> dict[str, Entry]:
    """Reads the files at these paths of a sandbox; removed ones are missing in the result.

    Args:
        scripts: Runs scripts in the sandbox.
        paths: At least one.
        objects: The store for file contents.
        notes: Gets a sentence for each thing that is not captured.
        skip: Returns whether a path is skipped.
        limits: The bounds.

    Raises:
        CaptureError: They cannot be read.
        ScriptFailedError: A command in the sandbox failed.
        ContainerError: The sandbox is gone, or the service does not answer.
    """
    names = b"".join(os.fsencode(f".{path}\0") for path in paths)  # no name starts with a dash
    await scripts.send(io.BytesIO(names), _NAMES)
    said = _SAID.fullmatch(await scripts.run(_PACK))
    if said is None or int(said[2]) > limits.max_bytes + _MORE_BYTES:
        raise CaptureError("The sandbox's files could not be read: it packed too much, or does not say how much.")
    if said[1] != "gnu":
        notes.append(_NO_GNU_TAR)
    sizes = [int(size) for size in said[3].split()] if said[1] != "gnu" else None
    more: list[str] = []
    async with scripts.fetched(_PACKED, int(said[2])) as file:
        read = await bounded(lambda skip: _read(file, sizes, objects, more, skip, limits), skip)
    if int(said[2]) > _LARGE_BYTES:
        await scripts.run(f"rm -f {_PACKED}")
    notes += more
    return read


def _read(
    file: IO[bytes],
    sizes: Sequence[int] | None,
    objects: ObjectStore,
    notes: list[str],
    skip: Skip,
    limits: DeltaLimits,
) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    try:
        if sizes is None:
            return read_tar(file, objects, notes=notes, skip=skip, limits=limits)
        for size in sizes:
            found |= read_tar(_Part(file, size), objects, notes=notes, skip=skip, limits=limits)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise CaptureError(f"The archive of the sandbox's files cannot be read: {error}.") from None
    return found


@dataclass
class _Part:
    """A stream of the next bytes of a file."""

    file: IO[bytes]
    left: int

    def read(self, size: int, /) -> bytes:
        data = self.file.read(min(size, self.left))
        self.left -= len(data)
        return data
