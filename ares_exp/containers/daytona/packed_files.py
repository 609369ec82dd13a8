"""Files of a sandbox as its `tar` packs them, into one file that is fetched and read as a stream."""

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
from ares_exp.containers.daytona.box_scripts import BoxScripts
from ares_exp.containers.daytona.file_listing import DIRECTORY, PRELUDE, UNREADABLE
from ares_exp.errors import CaptureError
from ares_exp.filesystem.delta import DeltaLimits, Entry
from ares_exp.filesystem.objects import ObjectStore
from ares_exp.filesystem.tar_entries import read_tar
from ares_exp.filesystem.tar_program import GNU_CREATE, READ_SOMETHING

_LARGE_BYTES = 16 * 2**20
_MORE_BYTES = 2**28  # headers, and what compression may add
_NAMES, _PACKED = f"{DIRECTORY}/names", f"{DIRECTORY}/packed"

# Other tars than GNU's are given names as arguments, as many as there may be: each time they make another archive.
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
    box: BoxScripts,
    paths: Sequence[str],
    objects: ObjectStore,
    notes: list[str],
    skip: Skip,
    limits: DeltaLimits,
) -> dict[str, Entry]:
    """What is at these paths of a sandbox: those that are gone by now are missing.

    Args:
        box: The sandbox.
        paths: At least one.
        objects: Where contents go.
        notes: Gets a sentence for each thing that is not kept.
        skip: Whether a path is left out.
        limits: Bounds.

    Raises:
        CaptureError: They could not be read.
        ScriptFailedError: A command in the sandbox failed.
        ContainerError: The sandbox is gone, or the service does not answer.
    """
    names = b"".join(os.fsencode(f".{path}\0") for path in paths)  # none begins with a dash
    await box.send(io.BytesIO(names), _NAMES)
    said = _SAID.fullmatch(await box.run(_PACK))
    if said is None or int(said[2]) > limits.max_bytes + _MORE_BYTES:
        raise CaptureError("The sandbox's files could not be read: it packed too much, or does not say how much.")
    if said[1] != "gnu":
        notes.append(_NO_GNU_TAR)
    sizes = [int(size) for size in said[3].split()] if said[1] != "gnu" else None
    more: list[str] = []
    async with box.fetched(_PACKED, int(said[2])) as file:
        read = await bounded(lambda skip: _read(file, sizes, objects, more, skip, limits), skip)
    if int(said[2]) > _LARGE_BYTES:
        await box.run(f"rm -f {_PACKED}")
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
    """The next bytes of a file."""

    file: IO[bytes]
    left: int

    def read(self, size: int, /) -> bytes:
        data = self.file.read(min(size, self.left))
        self.left -= len(data)
        return data
