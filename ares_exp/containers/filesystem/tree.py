"""Writer of a delta's files into a directory on the host, which may be the upper directory of an overlay."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ares_exp.containers.filesystem.delta import Entry, contents
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import RestoreError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, open_beneath


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
