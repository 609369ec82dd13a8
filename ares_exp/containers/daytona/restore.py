"""Restore of changed files into a new sandbox: one upload, one command, and a verification."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from ares_exp.cancellation import in_thread
from ares_exp.containers.daytona.file_listing import DIRECTORY, PRELUDE, UNREADABLE, Started
from ares_exp.containers.daytona.listed_changes import Changes, Listed
from ares_exp.containers.daytona.sandbox_scripts import SandboxScripts
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges
from ares_exp.containers.filesystem.layer import write_layer
from ares_exp.errors import RestoreError, UnsafeSnapshotError

_UPLOAD = f"{DIRECTORY}/upload"
_KINDS = {"file": "f", "directory": "d", "symlink": "l", "fifo": "p"}
_SHOWN = 3
_READ_BYTES = 2**20
_GNU_EXTRACT = (
    "--extract --preserve-permissions --same-owner --numeric-owner --absolute-names --delay-directory-restore "
    # Its other messages do not matter: names that are not UTF-8 (`hdrcharset`), times in the future.
    "--xattrs --xattrs-include='*' --warning=no-unknown-keyword --warning=no-timestamp"
)


async def put_back(
    scripts: SandboxScripts, changes: StoredChanges, is_skipped: Callable[[str], bool], started: Started
) -> None:
    """Writes the changed files into a fresh sandbox.

    Args:
        scripts: Runs scripts in the sandbox.
        changes: Relative to its base.
        is_skipped: Returns whether a path is not the agent's.
        started: Its programs. A `tar` other than GNU's drops fractions of seconds, and times and owners of links.

    Raises:
        RestoreError: Its `tar` cannot keep attributes of the files.
        UnsafeSnapshotError: The changes have paths that are not the agent's.
        SnapshotMetadataError: An object of the changes is missing or damaged.
        ScriptFailedError: A command in the sandbox failed.
        ContainerError: The sandbox is gone, or the service does not answer.
    """
    for path, entry in changes.delta.entries.items():
        if is_skipped(path):
            raise UnsafeSnapshotError(f"A snapshot must not have {path!r}: that is not the sandbox's own.")
        if entry.xattrs and not started.has_gnu_tar:
            raise RestoreError(
                f"{path!r} has the attribute {min(entry.xattrs)!r}, which the sandbox's `tar` cannot set. Add GNU tar "
                "to the task's image."
            )
    with tempfile.TemporaryFile(prefix="ares_exp-changes-") as file:
        digest, sizes = await in_thread(lambda: _write(changes, file, started))
        await scripts.send(file, _UPLOAD)
    await scripts.run(_unpack_script(started, digest, sizes))


def _write(changes: StoredChanges, file: IO[bytes], started: Started) -> tuple[str, list[int]]:
    """Writes the names to remove, the names to replace, and the archives. Blocking.

    Returns:
        The digest of the whole, and the sizes of its parts.
    """
    entries = changes.delta.entries
    gone = b"".join(_name(path) for path, entry in entries.items() if entry.kind == "whiteout" or entry.opaque)
    files = {path: replace(entry, opaque=False) for path, entry in entries.items() if entry.kind != "whiteout"}
    there = b"".join(_KINDS[entry.kind].encode() + _name(path) for path, entry in files.items())
    sizes = [file.write(gone), file.write(there)]
    archives = [files]
    if not started.has_gnu_tar:  # a new entry changes the directory's time, and only GNU tar sets it last
        archives.append({path: entry for path, entry in files.items() if entry.kind == "directory"})
    for members in archives:
        _write_archive(StoredChanges(Delta(changes.delta.base, members), changes.objects), file, started)
        sizes.append(file.tell() - sum(sizes))
    file.seek(0)
    digest = hashlib.sha256()
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest(), sizes


def _write_archive(changes: StoredChanges, file: IO[bytes], started: Started) -> None:
    is_gnu = started.has_gnu_tar
    if started.has_gzip:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
            write_layer(changes, packed, plain=True, sparse=is_gnu, pax=is_gnu)
    else:
        write_layer(changes, file, plain=True, sparse=is_gnu, pax=is_gnu)


def _name(path: str) -> bytes:
    return os.fsencode(f".{path}\0")


def _unpack_script(started: Started, digest: str, sizes: Sequence[int]) -> str:
    unzip = "gzip -dc" if started.has_gzip else "cat"
    extract = _GNU_EXTRACT if started.has_gnu_tar else "-x -p"
    or_says_anything = ' || [ -s "$d/errors" ]' if started.has_gnu_tar else ""  # about attributes that it cannot set
    return f"""\
{PRELUDE}
set -- $(sha256sum <{_UPLOAD})
if [ "$1" != {digest} ]; then echo 'it arrived as something else'; exit {UNREADABLE}; fi
at=1
next() {{ tail -c +"$at" {_UPLOAD} | head -c "$1"; }}
next {sizes[0]} | xargs -0 sh -c 'if [ $# != 0 ]; then rm -rf -- "$@"; fi' sh || exit {UNREADABLE}
at=$((at + {sizes[0]}))
next {sizes[1]} | xargs -0 sh -c '
    for path do
        name=${{path#?}}
        if [ -L "$name" ]; then is=other; elif [ -d "$name" ]; then is=dir; elif [ -e "$name" ]; then is=other
        else continue; fi
        case $is$path in
            dird* | other[!d]*) ;;
            *) rm -rf -- "$name" || exit 255;;
        esac
    done' sh || exit {UNREADABLE}
at=$((at + {sizes[1]}))
for size in {" ".join(map(str, sizes[2:]))}; do
    next "$size" | {unzip} | tar {extract} -f - 2>"$d/errors"
    code=$?
    if [ $code != 0 ]{or_says_anything}; then
        read -r line <"$d/errors"; printf 'tar says: %.400s\\n' "$line"; exit {UNREADABLE}
    fi
    at=$((at + size))
done
rm -f {_UPLOAD}
"""


def verify(entries: Mapping[str, Entry], found: Changes, *, has_gnu_tar: bool) -> None:
    """Checks that a sandbox, listed after `put_back`, has the written files.

    Contents are verified by the digest of the upload, and by the silence of `tar`.

    Args:
        entries: The written entries.
        found: Its changes now.
        has_gnu_tar: If not, only whole seconds are compared, and neither times nor owners of links.

    Raises:
        RestoreError: They differ.
    """
    wrong: list[str] = []
    names: dict[int, set[str]] = {}
    listed_names: dict[bytes, set[str]] = {}
    for path, entry in entries.items():
        listed = found.now.get(path)
        if entry.kind == "whiteout":
            wrong += [f"{path!r} is still there"] if listed is not None else []
        elif listed is None:
            wrong.append(f"{path!r} is not as it was written")
        else:
            wrong += _differences(path, entry, listed, has_gnu_tar=has_gnu_tar)
            if entry.link is not None:
                names.setdefault(entry.link, set()).add(path)
            if listed.file is not None:
                listed_names.setdefault(listed.file, set()).add(path)
    groups = {frozenset(group) for group in names.values() if len(group) > 1}
    if strange := groups ^ {frozenset(group) for group in listed_names.values()}:
        wrong.append(f"{min(map(min, strange))!r} has other names than it had")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise RestoreError(
            "The snapshot's files were written, and are something else in the sandbox: "
            f"{'; '.join(wrong[:_SHOWN])}{more}."
        )


def _differences(path: str, entry: Entry, listed: Listed, *, has_gnu_tar: bool) -> list[str]:
    unit = 1 if has_gnu_tar else 10**9
    pairs: dict[str, tuple[object, object]] = {"kind": (_KINDS[entry.kind], listed.kind)}
    if entry.kind != "symlink":
        pairs["mode"] = (entry.mode, listed.mode)
    if entry.kind != "symlink" or has_gnu_tar:
        pairs["owner"] = ((entry.uid, entry.gid), (listed.uid, listed.gid))
        pairs["time"] = (entry.mtime_ns // unit, listed.mtime_ns // unit)
    if entry.kind in ("file", "symlink"):
        pairs["size"] = (entry.size if entry.kind == "file" else len(os.fsencode(entry.target)), listed.size)
    return [f"{path!r}: its {what} is {is_} instead of {was}" for what, (was, is_) in pairs.items() if was != is_]
