"""The changed files of one sandbox: those it starts with, and captures.

No engine lists the changes. So the sandbox lists its files at its start and at each capture (`file_listing`); its `tar`
packs the differing files that were not read before, and the file API fetches them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from dataclasses import replace

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.file_listing import (
    ALTERED,
    CHANGES,
    DIRECTORY,
    START,
    UNSUITABLE,
    Compared,
    Started,
    compare_script,
)
from ares_exp.containers.daytona.listed_changes import MAX_PACKED_BYTES, Changes, Listed, read_changes
from ares_exp.containers.daytona.packed_files import read_files
from ares_exp.containers.daytona.restore import put_back, verify
from ares_exp.containers.daytona.sandbox_base import require_base
from ares_exp.containers.daytona.sandbox_scripts import Fetch, Run, SandboxScripts, ScriptFailedError, Send
from ares_exp.containers.filesystem.delta import (
    Delta,
    DeltaLimits,
    Entry,
    StoredChanges,
    in_directories,
    is_kept,
    link_number,
    parents,
)
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.filesystem.tar_entries import YOUNG_SEC
from ares_exp.errors import (
    CaptureError,
    ContainerDiedError,
    ContainerError,
    RestoreError,
    SnapshotUnsupportedError,
)

SERVICE_PATHS = (
    "/.dockerenv",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/usr/local/bin/daytona",
    "/usr/local/lib/daytona-computer-use",
    "/tmp/daytona-daemon.log",
    "/tmp/daytona-entrypoint.log",
    "/tmp/daytona_repl_worker.py",
    "/root/.daytona",
    "/home/daytona/.daytona",
)
"""Paths of the service's daemon, its logs and session output in every sandbox; no delta has them."""

_KEPT_KINDS = "fdlp"


class SandboxFiles:
    """The changed files of one sandbox, from its creation to its deletion."""

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        base: str,
        run: Run,
        fetch: Fetch,
        send: Send,
        skip: Collection[str],
        limits: DeltaLimits | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            spec: Its `changes` are those it starts with, if any.
            base: Its `Delta.base`; see `sandbox_base`.
            run: Runs a command in it, as root.
            fetch: Reads a file of it.
            send: Writes a file of it.
            skip: Paths that are skipped with their contents: those of the relay.
            limits: Bounds on a delta.
        """
        self._changes = spec.changes
        self._base = base
        self._box = SandboxScripts(run, fetch, send)
        self._skipped = frozenset((*skip, *SERVICE_PATHS, DIRECTORY))
        self._limits = limits or DeltaLimits()
        self._known: dict[str, tuple[bytes, Entry]] = {}
        self._mounts: set[str] | None = None
        self._started: Started | None = None
        self._unsupported = ""
        self._one_at_a_time = asyncio.Lock()

    async def has_started(self) -> None:
        """Lists the files of the new sandbox before any command, and writes the spec's changes into it.

        A sandbox that cannot be listed can still be used: only a capture fails.

        Raises:
            SnapshotMismatchError: The changes belong to another base.
            RestoreError: They could not be written, or differ when read back.
            SnapshotMetadataError: An object of the changes is missing or damaged, or they have entries that no capture
                makes.
            ContainerError: The sandbox is gone, or the service does not answer.
        """
        if self._changes is not None:
            require_base(self._changes.delta.base, self._base)
        try:
            self._started = Started.parse(await self._box.run(START))
            self._unsupported = "" if self._started is not None else "its programs do not say what they should"
        except ScriptFailedError as error:
            is_program = error.exit_code == UNSUITABLE
            self._unsupported = f"there is no `{error}` in it" if is_program else str(error)
        if self._changes is not None and self._changes.delta.entries:
            await self._restore(self._changes)

    async def _restore(self, changes: StoredChanges) -> None:
        if self._started is None:
            raise RestoreError(f"The sandbox could not be given its files back: {self._unsupported}.")
        try:
            await put_back(self._box, changes, self._is_skipped, self._started)
            _, found = await self._compare(self._started)
        except ContainerDiedError:
            raise
        except (ScriptFailedError, CaptureError, ContainerError) as error:
            text = str(error).rstrip(".")
            raise RestoreError(f"The sandbox could not be given its files back: {text}.") from error
        verify(changes.delta.entries, found, has_gnu_tar=self._started.has_gnu_tar)
        # No command has run yet: each file certainly is as written.
        for path, entry in changes.delta.entries.items():
            if entry.kind != "whiteout" and self._started.has_gnu_tar:
                self._known[path] = (found.now[path].signature, entry)

    async def capture(self, objects: ObjectStore) -> Delta:
        if self._started is None and not self._unsupported:
            raise ContainerDiedError("The container has not been started.")
        if self._started is None:
            raise SnapshotUnsupportedError(
                f"The files of this sandbox cannot be captured: {self._unsupported}. Add it to the task's image, or "
                "set container.capture=provider."
            )
        notes: list[str] = []
        try:
            async with self._one_at_a_time:
                entries = await self._read(self._started, objects, notes)
        except ContainerDiedError:
            raise
        except ScriptFailedError as error:
            reason = f"{DIRECTORY} was removed or written to" if error.exit_code == ALTERED else str(error)
            raise CaptureError(f"The sandbox's files could not be read: {reason}.") from error
        except ContainerError as error:
            raise CaptureError(f"The sandbox's files could not be read. {error}") from error
        return Delta(self._base, entries, tuple(notes[: self._limits.max_notes]))

    async def _compare(self, started: Started) -> tuple[Compared, Changes]:
        compared = Compared.parse(await self._box.run(compare_script(started)))
        if compared is None or compared.size > MAX_PACKED_BYTES:
            raise CaptureError("The sandbox's files could not be read: it does not say what changed.")
        async with self._box.fetched(CHANGES, compared.size) as file:
            changes = await asyncio.to_thread(read_changes, file, started.style, self._limits)
        changes.mounts -= set(started.roots)
        if self._mounts is None:
            self._mounts = changes.mounts
        return compared, changes

    async def _read(self, started: Started, objects: ObjectStore, notes: list[str]) -> dict[str, Entry]:
        compared, changes = await self._compare(started)
        if compared.unlisted:
            notes.append(
                f"{compared.unlisted} names with line breaks are not kept: there is no GNU find in the sandbox."
            )
        notes += [f"{path!r} is not kept: it is a mount." for path in sorted(changes.mounts - (self._mounts or set()))]

        def skip(path: str) -> bool:
            return path == "/" or not is_kept(path) or self._is_skipped(path) or _is_below(path, changes.mounts)

        now = {path: listed for path, listed in changes.now.items() if not skip(path)}
        before = {path for path in changes.before if not skip(path)}
        for path in [path for path, listed in now.items() if listed.kind not in _KEPT_KINDS]:
            notes.append(f"{path!r} is not kept: it is a {'socket' if now.pop(path).kind == 's' else 'device'}.")
        self._check_bounds(now)
        above = {parent for path in (*now, *before) for parent in parents(path)}
        there = sorted(now.keys() | {path for path in above if path in now or path not in before}, key=os.fsencode)
        old = await asyncio.to_thread(self._unchanged, now, objects)
        wanted = [path for path in there if path not in old]
        read = await read_files(self._box, wanted, objects, notes, skip, self._limits) if wanted else {}
        if not started.has_gnu_tar:  # busybox truncates large values
            read |= {p: replace(read[p], uid=now[p].uid, gid=now[p].gid) for p in now.keys() & read.keys()}
        read = _linked(read, now)
        noted = "".join(notes)
        notes += [
            f"{path!r} is not kept: it was removed while it was to be read."
            for path in wanted
            if path not in read and repr(path) not in noted
        ]
        self._known = {path: self._known[path] for path in old}
        for path in now.keys() & read.keys():
            if compared.clock_sec - now[path].changed_sec >= YOUNG_SEC:
                self._known[path] = (now[path].signature, read[path])
        found = {**old, **read}
        return in_directories(found | {path: Entry("whiteout") for path in before - found.keys()})

    def _unchanged(self, now: Mapping[str, Listed], objects: ObjectStore) -> dict[str, Entry]:
        """Returns the entries read before and unchanged; of hard links, all names or none. Blocking."""
        found: dict[str, Entry] = {}
        for path, listed in now.items():
            signature, entry = self._known.get(path, (b"", None))
            is_known = entry is not None and signature == listed.signature
            if entry is not None and is_known and all(chunk is None or objects.keep(chunk) for chunk in entry.chunks):
                found[path] = entry
        torn = {listed.file for path, listed in now.items() if listed.file and path not in found}
        return {path: entry for path, entry in found.items() if now[path].file not in torn}

    def _check_bounds(self, now: Mapping[str, Listed]) -> None:
        """Checks the bounds before packing; the archive's contents are checked again when read."""
        size = sum(listed.size for listed in now.values() if listed.kind == "f")
        if len(now) > self._limits.max_entries or size > self._limits.max_bytes:
            raise CaptureError(
                f"Expected at most {self._limits.max_entries} changed files, {self._limits.max_bytes} bytes together, "
                f"found {len(now)}, {size} bytes together. Remove files that are not needed."
            )

    def _is_skipped(self, path: str) -> bool:
        return _is_below(path, self._skipped)


def _is_below(path: str, directories: Collection[str]) -> bool:
    return path in directories or any(parent in directories for parent in parents(path))


def _linked(entries: Mapping[str, Entry], now: Mapping[str, Listed]) -> dict[str, Entry]:
    """Marks the names of one file as hard links, with the entry that was read last, as it may have changed between."""
    groups: dict[bytes, list[str]] = {}
    for path, entry in entries.items():
        if entry.kind == "file" and path in now and (file := now[path].file) is not None:
            groups.setdefault(file, []).append(path)
    found = {path: replace(entry, link=None) for path, entry in entries.items()}
    for names in groups.values():
        if len(names) > 1:
            names.sort(key=os.fsencode)
            found |= dict.fromkeys(names, replace(found[names[-1]], link=link_number(names[0])))
    return found
