"""Reader and writer of an overlay's upper directory, which contains the files that a container has changed.

A character device with the number 0/0, or an empty file with the attribute `overlay.whiteout`, marks a deleted path. A
directory with the attribute `overlay.opaque` hides the base's directory. The full names of these attributes start with
`trusted.overlay.`, or with `user.overlay.` for a mount with `userxattr`
(https://docs.kernel.org/filesystems/overlayfs.html).

The directory belongs to an untrusted container, which may be running. So the reader follows no link, and opens no path
that the container could redirect meanwhile. The writer also writes to a directory that is not part of an overlay.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from ares_exp.containers.filesystem.delta import (
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_MTIME_NS,
    MAX_PATH_BYTES,
    ChunkWriter,
    Entry,
    EntryKind,
    FileChangedError,
    add_note,
    contents,
    is_kept,
    is_kept_xattr,
    link_number,
    read_file,
    sorted_by_path,
)
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.errors import CaptureError, RestoreError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, open_beneath
from ares_exp.records.secrets import KnownSecrets

_OVERLAY = ("trusted.overlay.", "user.overlay.")
_ELSEWHERE = ("redirect", "metacopy")  # the content, or the name, is not in this directory
_TRIES = 3
_RACY_NS = 20_000_000  # two writes within one tick of the kernel's clock have the same times


ScanCache = dict[Path, dict[int, tuple[tuple[int, ...], Entry]]]
"""Cache of the entries of files, by upper directory and inode, so that a scan reads only changed files again.

Only one scan may use a cache at a time. A file counts as unchanged if its size, mode and times are the same. Data
written through a shared memory mapping may be missed, because the kernel changes the times only when it writes the data
back.
"""


def scan(
    upper: Path,
    objects: ObjectStore,
    cache: ScanCache,
    *,
    notes: list[str],
    at: str = "/",
    skip: Callable[[str], bool] = lambda path: False,
    root_ids: tuple[int, int] = (0, 0),
) -> dict[str, Entry]:
    """Reads an upper directory, stores the contents of its files in `objects`, and returns the entries of a delta.

    The entries are sorted by path, parents first. `at` itself has an entry unless it is `/`. A file that cannot be
    captured is left out, with a sentence in `notes`. Raises `CaptureError` with the path and the reason if a file
    cannot be read, is too large, contains a known secret, or depends on data outside of `upper`.

    Args:
        upper: The upper directory on the host.
        objects: Store that receives the contents of files.
        cache: Cache of earlier scans of the same container. The scan updates it.
        notes: List to which the sentences are added.
        at: Path in the container at which the overlay is mounted.
        skip: Function that returns whether to leave out a path in the container and everything below it.
        root_ids: Uid and gid on the host that correspond to root (0) in the container, for a container in a user
            namespace.
    """
    try:
        root = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"The changed files in {upper} cannot be read: {error.strerror}.") from None
    try:
        with ThreadPoolExecutor(3, "ares-exp-scan") as pool:  # its threads start with the first large file
            known = cache.get(upper, {})
            run = _Scan(root, objects, pool, known, notes, at.rstrip("/"), skip, root_ids)
            entries = run.entries()
    finally:
        os.close(root)
    cache[upper] = run.fresh
    return entries


@dataclass
class _Scan:
    root: int
    objects: ObjectStore
    pool: Executor
    known: dict[int, tuple[tuple[int, ...], Entry]]
    notes: list[str]
    at: str
    skip: Callable[[str], bool]
    root_ids: tuple[int, int]
    fresh: dict[int, tuple[tuple[int, ...], Entry]] = field(default_factory=dict)
    secrets: KnownSecrets = field(default_factory=KnownSecrets)
    kept: dict[str, Entry] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)  # names of files with several names, by inode
    total_bytes: int = 0

    def entries(self) -> dict[str, Entry]:
        directories = [self.at]
        while directories:
            path = directories.pop()
            try:
                with open_beneath(self.root, path[len(self.at) :]) as directory:
                    xattrs, marks = self._xattrs(path, directory)
                    opaque = marks.get("opaque", "")
                    if path:
                        entry = self._metadata("directory", os.fstat(directory))
                        self._keep(path, replace(entry, xattrs=xattrs, opaque=opaque == "y"))
                    with os.scandir(directory) as found:
                        for item in found:
                            if self._add(directory, f"{path}/{item.name}", item, opaque):
                                directories.append(f"{path}/{item.name}")
            except OSError as error:
                if path == self.at or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
                    raise CaptureError(f"{path or '/'} cannot be read: {error.strerror}.") from None
                # The directory was removed during the scan.
                for gone in [name for name in self.kept if name == path or name.startswith(path + "/")]:
                    del self.kept[gone]
        return self._linked()

    def _add(self, directory: int, path: str, item: os.DirEntry[str], opaque: str) -> bool:
        """Adds the entry of a directory's item, or returns true if the item is a directory, to be scanned later."""
        if not is_kept(path) or self.skip(path):
            return False
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise CaptureError(f"Expected paths of at most {MAX_PATH_BYTES} bytes, found a longer one: {path[:200]}…")
        try:
            found = item.stat(follow_symlinks=False)
            kind = stat.S_IFMT(found.st_mode)
            if kind == stat.S_IFDIR:
                return True
            if kind == stat.S_IFREG:
                self._add_file(directory, path, item.name, found, opaque)
            elif kind == stat.S_IFLNK:
                target = os.readlink(item.name, dir_fd=directory)
                self._keep(path, replace(self._metadata("symlink", found), mode=0, target=target))
            elif kind == stat.S_IFIFO:
                self._keep(path, self._metadata("fifo", found))
            elif kind == stat.S_IFCHR and found.st_rdev == 0:
                self._keep(path, Entry("whiteout"))
            else:
                special = "socket" if kind == stat.S_IFSOCK else "device"
                add_note(self.notes, f"{path!r} is not captured: it is a {special}.")
        except FileNotFoundError:
            pass  # it was removed during the scan
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CaptureError(f"{path!r} cannot be stored: the snapshot store's disk is full.") from None
            raise CaptureError(f"{path!r} cannot be read: {error.strerror}.") from None
        return False

    def _add_file(self, directory: int, path: str, name: str, found: os.stat_result, opaque: str) -> None:
        signed, entry = self.known.get(found.st_ino) or self.fresh.get(found.st_ino) or (None, None)
        if (
            signed != _signature(found)
            or entry is None
            or not all(one is None or self.objects.keep(one) for one in entry.chunks)
        ):
            found, entry = self._read(directory, path, name, opaque)
            if entry is None:
                return
        if time.time_ns() - found.st_ctime_ns > _RACY_NS:
            self.fresh[found.st_ino] = (_signature(found), entry)
        if found.st_nlink > 1:
            self.names.setdefault(found.st_ino, []).append(path)
        self._keep(path, entry)

    def _read(self, directory: int, path: str, name: str, opaque: str) -> tuple[os.stat_result, Entry | None]:
        """Reads a file that may change during the read. Returns its `stat` result and its entry.

        If the file marks a deletion, adds the entry of the deletion, and returns `None` instead of an entry.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=directory)
        try:
            for attempt in range(_TRIES):
                before = os.fstat(file)
                if not stat.S_ISREG(before.st_mode):
                    raise FileNotFoundError  # the file is gone, and its name was reused
                xattrs, marks = self._xattrs(path, file)
                if "whiteout" in marks and opaque == "x" and not before.st_size:
                    self._keep(path, Entry("whiteout"))
                    return before, None
                if before.st_size > MAX_BYTES - self.total_bytes:
                    self._refuse_size(path)
                pool = self.pool if before.st_size > CHUNK_BYTES else None
                try:
                    chunks = read_file(ChunkWriter(path, self.objects, pool, self.secrets), file, before.st_size)
                except FileChangedError:
                    if attempt < _TRIES - 1:
                        continue
                    raise CaptureError(f"{path!r} cannot be read: a process shortened it during every read.") from None
                after = os.fstat(file)
                if _signature(before) == _signature(after):
                    break
            else:
                add_note(
                    self.notes, f"{path!r} was modified while it was read: the stored content may be inconsistent."
                )
            return before, replace(self._metadata("file", before), size=before.st_size, chunks=chunks, xattrs=xattrs)
        finally:
            os.close(file)

    def _xattrs(self, path: str, file: int) -> tuple[dict[str, bytes], dict[str, str]]:
        """Returns a file's attributes for the delta, and separately overlayfs's attributes without their prefix."""
        kept, marks = {}, {}
        try:
            names = os.listxattr(file)
        except OSError as error:
            if error.errno != errno.ENOTSUP:  # ENOTSUP: a plain directory, on a file system without attributes
                raise
            names = []
        for name in names:
            if name.startswith(_OVERLAY):
                mark = name.partition("overlay.")[2]
                if mark in _ELSEWHERE:
                    raise CaptureError(
                        f"{path!r} cannot be read: the overlay stores a part of the file elsewhere ({name}). "
                        "Mount the overlay without redirect_dir and metacopy."
                    )
                marks[mark] = os.getxattr(file, name).decode("latin-1") if mark == "opaque" else ""
            elif is_kept_xattr(name):
                kept[name] = os.getxattr(file, name)
        return kept, marks

    def _metadata(self, kind: EntryKind, found: os.stat_result) -> Entry:
        uid, gid = found.st_uid, found.st_gid
        return Entry(
            kind,
            mode=stat.S_IMODE(found.st_mode),
            uid=0 if uid == self.root_ids[0] else uid,
            gid=0 if gid == self.root_ids[1] else gid,
            mtime_ns=max(-MAX_MTIME_NS, min(MAX_MTIME_NS, found.st_mtime_ns)),
        )

    def _keep(self, path: str, entry: Entry) -> None:
        if len(self.kept) >= MAX_ENTRIES:
            raise CaptureError(f"A snapshot can contain at most {MAX_ENTRIES} changed files (last read: {path!r}).")
        self.total_bytes += entry.size
        if self.total_bytes > MAX_BYTES:
            self._refuse_size(path)
        self.kept[path] = entry

    def _refuse_size(self, path: str) -> None:
        raise CaptureError(
            f"The changed files have more than {MAX_BYTES} bytes in total (last read: {path!r}). Remove "
            "files that are not needed, or keep them out of the container's own file system."
        )

    def _linked(self) -> dict[str, Entry]:
        for names in self.names.values():
            names = sorted(name for name in names if name in self.kept)
            # All names get the last read content, because the file may have changed between the reads.
            if len(names) > 1:
                entry = replace(self.kept[names[-1]], link=link_number(names[0]))
                self.kept.update(dict.fromkeys(names, entry))
        return sorted_by_path(self.kept)


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode


def write_tree(
    entries: Mapping[str, Entry],
    objects: ObjectStore,
    directory: Path,
    *,
    at: str = "/",
    opaque_xattr: str | None = None,
    root_ids: tuple[int, int] = (0, 0),
) -> None:
    """Writes the entries of a delta into a directory that no other process uses. Never follows a link.

    Raises `RestoreError` with the path and the reason if an entry cannot be written, and `SnapshotCorruptError` for a
    missing or damaged object.

    Args:
        entries: Entries by path in the container, at or below `at`. Directories above an entry must also have entries,
            as in a `Delta`.
        objects: Store that contains the contents of files.
        directory: Existing directory. Directories of `entries` may already exist in it, but none of the other entries.
        at: Path in the container that corresponds to `directory`.
        opaque_xattr: `"trusted.overlay.opaque"` or `"user.overlay.opaque"` if `directory` is the upper directory of an
            overlay, which can hold deletions. `None` otherwise: deletions are then rejected.
        root_ids: Uid and gid on the host that correspond to root (0) in the container.
    """
    at = at.rstrip("/")
    for path, entry in entries.items():
        if not f"{path}/".startswith(f"{at}/"):
            raise RestoreError(f"{path!r} cannot be created: it is outside of {at}.")
        if path == at and entry.kind != "directory":
            raise RestoreError(f"{path!r} cannot be created: it must be a directory, not a {entry.kind}.")
        if opaque_xattr is None and (entry.opaque or entry.kind == "whiteout"):
            raise RestoreError(f"{path!r} cannot be deleted: only an overlay can hide files of the base directory.")
    try:
        root = os.open(directory, DIRECTORY_FLAGS)
    except OSError as error:
        raise RestoreError(f"{directory} cannot be written to: {error.strerror}.") from None
    tree = _Tree(objects, root, at, root_ids)
    try:
        # Grouped by directory, so that each directory is opened once. Each directory is created before its contents,
        # with all rights only for its owner.
        in_order = sorted(entries.keys() - {at}, key=lambda path: path.rpartition("/")[::2])
        for above, paths in groupby(in_order, key=lambda path: path.rpartition("/")[0]):
            first = next(paths)
            with _blamed_on(first), tree.opened(above) as parent:
                for path in (first, *paths):
                    with _blamed_on(path):
                        tree.make(path, entries[path], path.rpartition("/")[2], parent)
        # Last, set times and modes of directories, the deepest first, because writing into a directory changes its
        # times.
        for path in sorted((path for path in entries if entries[path].kind == "directory"), reverse=True):
            with _blamed_on(path), tree.opened(path) as descriptor:
                tree.give(path, entries[path], descriptor)
                if opaque_xattr is not None and entries[path].opaque:
                    os.setxattr(descriptor, opaque_xattr, b"y")
                os.utime(descriptor, ns=(entries[path].mtime_ns, entries[path].mtime_ns))
    finally:
        os.close(root)


@dataclass(slots=True)
class _Tree:
    objects: ObjectStore
    root: int
    at: str
    root_ids: tuple[int, int]
    links: dict[int, str] = field(default_factory=dict)

    def opened(self, path: str) -> AbstractContextManager[int]:
        return open_beneath(self.root, path[len(self.at) :])

    def make(self, path: str, entry: Entry, name: str, parent: int) -> None:
        if entry.kind == "directory":
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise
        elif entry.kind == "file":
            self._make_file(path, entry, name, parent)
        elif entry.kind == "whiteout":
            os.mknod(name, stat.S_IFCHR, dir_fd=parent)
        else:
            if entry.kind == "symlink":
                os.symlink(entry.target, name, dir_fd=parent)
            else:
                os.mkfifo(name, dir_fd=parent)
            self._own(path, entry, name, parent)
            if entry.kind == "fifo":
                os.chmod(name, entry.mode, dir_fd=parent)
            times = (entry.mtime_ns, entry.mtime_ns)
            os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)

    def _make_file(self, path: str, entry: Entry, name: str, parent: int) -> None:
        if entry.link is not None and (first := self.links.setdefault(entry.link, path)) != path:
            above, _, first_name = first.rpartition("/")
            with self.opened(above) as source:
                os.link(first_name, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            return
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        with open(descriptor, "wb") as file:  # noqa: PTH123
            for part in contents(self.objects, path, entry):
                if isinstance(part, bytes):
                    file.write(part)
                else:
                    file.seek(part, os.SEEK_CUR)
            file.truncate(entry.size)  # a hole at the end
            self.give(path, entry, descriptor)
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))

    def give(self, path: str, entry: Entry, descriptor: int) -> None:
        """Sets owner, mode and attributes of a file. The owner comes first: changing it clears some mode bits."""
        self._own(path, entry, descriptor)
        os.fchmod(descriptor, entry.mode)
        for name, value in entry.xattrs.items():
            try:
                os.setxattr(descriptor, name, value)
            except OSError as error:
                raise RestoreError(f"The attribute {name!r} of {path!r} cannot be set: {error.strerror}.") from None

    def _own(self, path: str, entry: Entry, file: int | str, parent: int | None = None) -> None:
        uid, gid = entry.uid or self.root_ids[0], entry.gid or self.root_ids[1]
        # Check the actual owner: files inherit the group of some directories.
        found = os.stat(file, dir_fd=parent, follow_symlinks=parent is None)
        if (found.st_uid, found.st_gid) == (uid, gid):
            return
        try:
            os.chown(file, uid, gid, dir_fd=parent, follow_symlinks=parent is None)
        except OSError as error:
            raise RestoreError(
                f"The owner of {path!r} cannot be set to user {entry.uid}, group {entry.gid}: {error.strerror}."
            ) from None


@contextmanager
def _blamed_on(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RestoreError(f"{path!r} cannot be created: {error.strerror}.") from None
