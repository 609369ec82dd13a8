"""The files of a delta, made below a directory of the host: an overlay's upper directory, or a plain one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from ares_exp.containers.filesystem.delta import Entry
from ares_exp.containers.filesystem.file_chunks import contents
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
    lenient: bool = False,
) -> list[str]:
    """Makes entries below a directory that is not used by others. Never follows a link, its own ones included.

    Args:
        entries: With every directory above an entry, as in a `Delta`. All are at or below `at`.
        objects: Where contents are.
        directory: Exists; may have directories in it already, but nothing else in the way.
        at: The path that `directory` stands for.
        opaque_xattr: `"trusted.overlay.opaque"` or `"user.overlay.opaque"`: deletions are written as overlayfs reads
            them. `None`: it is no overlay, and deletions are refused.
        root_ids: The uid and gid outside that are 0 inside.
        lenient: Owners and attributes that this user may not set are left out instead of refused.

    Returns:
        A sentence for each thing that was left out.

    Raises:
        RestoreError: With the path and the reason.
        SnapshotCorruptError: An object is missing or damaged.
    """
    with _Tree(objects, directory, at.rstrip("/"), opaque_xattr, root_ids, lenient) as tree:
        # By directory, so that each is opened once; all are made before what is in them.
        for path in sorted(entries, key=lambda path: path.rpartition("/")[::2]):
            tree.make(path, entries[path])
        # Their times and modes last, the deepest first: what is made in one changes the first and needs the second.
        for path in sorted((path for path in entries if entries[path].kind == "directory"), reverse=True):
            tree.finish(path, entries[path])
        return tree.left_out


class _Tree:
    def __init__(
        self,
        objects: ObjectStore,
        directory: Path,
        at: str,
        opaque_xattr: str | None,
        root_ids: tuple[int, int],
        lenient: bool,
    ) -> None:
        self.left_out: list[str] = []
        self._objects, self._directory, self._at = objects, directory, at
        self._opaque_xattr, self._root_ids, self._lenient = opaque_xattr, root_ids, lenient
        self._links: dict[int, str] = {}
        self._resources = ExitStack()
        self._parent_path: str | None = None
        self._parent = self._root = -1

    def __enter__(self) -> Self:
        try:
            self._root = os.open(self._directory, DIRECTORY_FLAGS)
        except OSError as error:
            raise RestoreError(f"{self._directory} cannot be written to: {error.strerror}.") from None
        self._resources.callback(os.close, self._root)
        self._within = self._resources.enter_context(ExitStack())
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def make(self, path: str, entry: Entry) -> None:
        """Makes what is at a path; a directory is there with all rights then, for its owner alone."""
        if path == self._at:
            if entry.kind != "directory":
                raise RestoreError(f"{path!r} cannot be made: it has to be a directory here, not a {entry.kind}.")
            return
        with _blamed_on(path):
            parent, _, name = self._inside(path).rpartition("/")
            if parent != self._parent_path:
                self._within.close()
                self._parent = self._within.enter_context(open_beneath(self._root, parent))
                self._parent_path = parent
            self._make(path, entry, name, self._parent)

    def finish(self, path: str, entry: Entry) -> None:
        """Gives a directory its metadata."""
        with _blamed_on(path), open_beneath(self._root, self._inside(path)) as directory:
            self._give(path, entry, directory)
            if entry.opaque:
                os.setxattr(directory, self._overlay_mark(path), b"y")
            os.utime(directory, ns=(entry.mtime_ns, entry.mtime_ns))

    def _inside(self, path: str) -> str:
        if not path.startswith(f"{self._at}/") and path != self._at:
            raise RestoreError(f"{path!r} cannot be made: it is not in {self._at}.")
        return path[len(self._at) :]

    def _make(self, path: str, entry: Entry, name: str, parent: int) -> None:
        if entry.kind == "directory":
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise
        elif entry.kind == "file":
            self._make_file(path, entry, name, parent)
        elif entry.kind == "whiteout":
            self._overlay_mark(path)
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
        if entry.link is not None and (first := self._links.setdefault(entry.link, path)) != path:
            directory, _, first_name = self._inside(first).rpartition("/")
            with open_beneath(self._root, directory) as source:
                os.link(first_name, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            return
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            os.ftruncate(file, entry.size)
            offset = 0
            for part in contents(self._objects, path, entry):
                if isinstance(part, bytes):
                    _write_at(file, part, offset)
                offset += part if isinstance(part, int) else len(part)
            self._give(path, entry, file)
            os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(file)

    def _give(self, path: str, entry: Entry, file: int) -> None:
        """Sets the owner first: the kernel takes privileges from a file that changes hands."""
        self._own(path, entry, file)
        os.fchmod(file, entry.mode)
        for name, value in entry.xattrs.items():
            try:
                os.setxattr(file, name, value)
            except OSError as error:
                self._leave_out(f"{path!r} cannot have the attribute {name!r}: {error.strerror}.", error)

    def _own(self, path: str, entry: Entry, file: int | str, parent: int | None = None) -> None:
        uid, gid = entry.uid or self._root_ids[0], entry.gid or self._root_ids[1]
        # Whose it is, is asked, not assumed: files inherit the group of some directories.
        found = os.stat(file, dir_fd=parent, follow_symlinks=parent is None)
        if (found.st_uid, found.st_gid) == (uid, gid):
            return
        try:
            os.chown(file, uid, gid, dir_fd=parent, follow_symlinks=parent is None)
        except OSError as error:
            self._leave_out(f"{path!r} cannot belong to user {entry.uid}, group {entry.gid}: {error.strerror}.", error)

    def _leave_out(self, text: str, error: OSError) -> None:
        if not self._lenient or error.errno not in (errno.EPERM, errno.EINVAL, errno.ENOTSUP):
            raise RestoreError(text) from None
        self.left_out.append(text)

    def _overlay_mark(self, path: str) -> str:
        if self._opaque_xattr is None:
            raise RestoreError(f"{path!r} cannot be hidden here: only an overlay hides what the base has.")
        return self._opaque_xattr


@contextmanager
def _blamed_on(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RestoreError(f"{path!r} cannot be made: {error.strerror}.") from None


def _write_at(file: int, data: bytes, offset: int) -> None:
    """Writes all of `data` to an open file."""
    written = os.pwrite(file, data, offset)
    while written < len(data):
        written += os.pwrite(file, data[written:], offset + written)
