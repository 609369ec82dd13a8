"""Tar archives for copies into and out of containers. Archives from containers are untrusted. All functions block."""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from ares_exp.errors import TransferError

MAX_BYTES = 1024**3
MAX_MEMBERS = 100_000
MAX_PACKED_BYTES = MAX_BYTES + 1024 * MAX_MEMBERS  # with the headers
SPOOL_BYTES = 8 * 1024 * 1024
_PREFIX = ".download-"
_SHOWN = 5  # limit on the skipped members that the warning names

_logger = logging.getLogger(__name__)


def pack(source: Path, file_name: str) -> IO[bytes]:
    """Packs a host file, or the contents of a host directory, into a tar archive. The caller closes the archive.

    Modes and symlinks are preserved, but if `source` itself is a symlink, it is followed. Owner and group are root.
    For a directory, member names are relative to the directory. For a file, `file_name` is the member name. Raises
    `TransferError` if `source` cannot be read.
    """
    with ExitStack() as opened:
        spool = opened.enter_context(tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES))
        try:
            root = source.resolve(strict=True)
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
                if root.is_dir():
                    for child in sorted(root.iterdir()):
                        archive.add(child, child.name, filter=_owned_by_root)
                else:
                    archive.add(root, file_name, filter=_owned_by_root)
            spool.seek(0)
        except OSError as error:
            raise TransferError(f"Cannot read {source} for an upload: {error.strerror or error}.") from error
        opened.pop_all()  # the caller closes it
        return spool


def unpack_directory(
    stream: IO[bytes],
    target: Path,
    *,
    strip_root: bool = False,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> None:
    """Unpacks an untrusted tar stream into the host directory `target`, creating it if missing.

    Special files, and links that could leave `target`, are skipped with one warning. Symlinks are created last, so that
    no member is written through a symlink. If the archive ends early or is malformed, `target` stays unchanged.
    `strip_root` removes the first component of each member's name, which is the name of the packed directory itself.

    Raises:
        TransferError: A member's name leads out of `target`, the archive exceeds `max_bytes` or `max_members`, or the
            archive is malformed.
    """
    symlinks: list[tarfile.TarInfo] = []
    left_out: list[str] = []
    try:
        destination = target.resolve()
        home = destination if destination.is_dir() else destination.parent
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=_PREFIX) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in _bounded(archive, target, max_bytes, max_members, strip_root=strip_root):
                    if member.issym():
                        symlinks.append(member)
                    elif member.isreg() or member.isdir() or _links_to_a_file(member, new):
                        _extract(archive, member, new)
                    else:
                        left_out.append(f"special file or link {member.name!r}")
            for member in symlinks:
                if not _make_symlink(member, new):
                    left_out.append(f"link {member.name!r} to {member.linkname!r}")
            _move(new, destination)
    except (OSError, tarfile.TarError) as error:
        raise TransferError(f"Cannot unpack a download into {target}: {error}.") from error
    if left_out:
        shown, more = "; ".join(left_out[:_SHOWN]), len(left_out) - _SHOWN
        _logger.warning(
            "The download to %s leaves out unsafe entries: %s%s.",
            target,
            shown,
            f"; and {more} more" if more > 0 else "",
        )


def unpack_file(stream: IO[bytes], target: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Writes the regular file in an untrusted tar stream to the host path `target` atomically.

    Raises `TransferError` if the first member is not a regular file or is too large, or if the archive is malformed.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tarfile.open(fileobj=stream, mode="r|") as archive,
            tempfile.TemporaryDirectory(dir=target.parent, prefix=_PREFIX) as scratch,
        ):
            member = archive.next()
            if member is None or not member.isreg():
                raise TransferError(f"Cannot download to {target}: expected a regular file in the container.")
            if member.size > max_bytes:
                raise TransferError(f"Cannot download to {target}: {member.size} bytes exceed the limit {max_bytes}.")
            member.name = "file"
            _extract(archive, member, Path(scratch))
            (Path(scratch) / "file").replace(target)
    except (OSError, tarfile.TarError) as error:
        raise TransferError(f"Cannot write a download to {target}: {error}.") from error


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _bounded(
    archive: tarfile.TarFile, target: Path, max_bytes: int, max_members: int, *, strip_root: bool
) -> Iterator[tarfile.TarInfo]:
    """Yields the archive's members. Raises `TransferError` if they exceed a limit or a name leads out of `target`."""
    total = count = 0
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # a stream never goes back: keep memory flat
        total, count = total + member.size, count + 1
        if total > max_bytes:
            raise TransferError(f"The download to {target} exceeds the limit of {max_bytes} bytes.")
        if count > max_members:
            raise TransferError(f"The download to {target} exceeds the limit of {max_members} files.")
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise TransferError(
                f"The download to {target} contains a path outside of the target directory: {member.name!r}."
            )
        if strip_root:
            path = PurePosixPath(*path.parts[1:])
            member.name = str(path)
            if member.islnk():
                member.linkname = str(PurePosixPath(*PurePosixPath(member.linkname).parts[1:]))
        if path.parts:
            yield member


def _links_to_a_file(member: tarfile.TarInfo, target: Path) -> bool:
    to = PurePosixPath(member.linkname)
    is_inside = member.islnk() and not to.is_absolute() and ".." not in to.parts
    return is_inside and (target / to).is_file() and not (target / to).is_symlink()


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    path = target / member.name
    if path.is_symlink() or (path.exists() and not (path.is_dir() and member.isdir())):
        remove(path)
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.islnk():
        path.hardlink_to(target / member.linkname)
        return
    content = archive.extractfile(member)
    assert content is not None, "only links and special files have no content"
    with content, path.open("xb") as file:
        shutil.copyfileobj(content, file)
    mode = member.mode if member.mode & 0o100 else member.mode & ~0o111
    path.chmod(mode & 0o755 | 0o600)  # writable only for its owner, never setuid
    with suppress(OverflowError, ValueError):  # this machine cannot represent the time
        os.utime(path, (member.mtime, member.mtime))


def _make_symlink(member: tarfile.TarInfo, target: Path) -> bool:
    """Creates a symlink unless it could lead out of `target`, and returns whether the symlink was created.

    The link must be relative. Its target may contain `..` only at the start, and fewer times than the link's own path
    has components. The parent directories of the link must not be symlinks, because they could be at another depth.
    """
    name, path, parts = PurePosixPath(member.name), target / member.name, PurePosixPath(member.linkname).parts
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    in_real_directory = path.parent.resolve() == target.resolve() / name.parent
    relative = not PurePosixPath(member.linkname).is_absolute()
    stays_inside = relative and ".." not in parts[ups:] and ups < len(name.parts) and in_real_directory
    if stays_inside:
        remove(path)
        path.symlink_to(member.linkname)
    return stays_inside


def _move(new: Path, target: Path) -> None:
    """Moves a file or directory to `target`. Merges directories, and replaces any other existing file or link."""
    to_directory = target.is_dir() and not target.is_symlink()
    if new.is_dir() and not new.is_symlink():
        if to_directory:
            for child in new.iterdir():
                _move(child, target / child.name)
            return
        target.unlink(missing_ok=True)
    elif to_directory:
        shutil.rmtree(target)
    new.replace(target)


def remove(path: Path) -> None:
    """Removes a file, a link or a directory with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
