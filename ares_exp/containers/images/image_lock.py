"""A lock for one builder of an image at a time on this machine, released by the kernel with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ares_exp.containers.images.shared_work import Demand
from ares_exp.containers.ownership import locked
from ares_exp.errors import ContainerStartError

_LOOK_EVERY_SEC = 0.05


@contextlib.contextmanager
def image_lock(name: str, demand: Demand) -> Iterator[None]:
    """Holds the lock of `name` among this user's processes. Blocking; for a thread.

    Raises:
        WorkAbandoned: The demand ended first.
        ContainerStartError: The lock file cannot be created, or its directory is not private to this user.
    """
    file_name = hashlib.sha256(name.encode()).hexdigest()[:32]
    try:
        directory = _directory()
        try:
            descriptor = _locked(directory, file_name, demand)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(file_name, dir_fd=directory)  # under the lock: no other process locks this name
                os.close(descriptor)
                _remove_stale_locks(directory)
        finally:
            os.close(directory)
    except _LockError as error:
        raise ContainerStartError(str(error)) from error


class _LockError(Exception):
    """An error of the lock, as opposed to errors of the work under the lock."""


def lock_directory() -> Path:
    """Returns the directory of this user's lock files, which may not exist."""
    return Path(tempfile.gettempdir()) / f"ares_exp-locks-{os.geteuid()}"


def _directory() -> int:
    """Opens a private directory of this user, so that no other user can put links into it."""
    path = lock_directory()
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _LockError(f"Cannot open {path}, the directory of image build locks: {error}.") from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise _LockError(
            f"Expected {path} to be a directory of user {os.geteuid()} alone, found one of user {found.st_uid} with "
            f"mode {found.st_mode & 0o7777:o}. Remove it, or set TMPDIR to a directory of your own."
        )
    return descriptor


def _locked(directory: int, name: str, demand: Demand) -> int:
    """Opens and locks the file; retries if its holder removed it while we waited."""
    while True:
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        except OSError as error:
            raise _LockError(f"Cannot make a lock file in {tempfile.gettempdir()}: {error}.") from error
        try:
            _wait(descriptor, demand)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_stale_locks(directory: int) -> None:
    for name in os.listdir(directory):
        with (
            contextlib.suppress(OSError),
            locked(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory) as descriptor,
        ):
            if os.fstat(descriptor).st_nlink:
                os.unlink(name, dir_fd=directory)


def _wait(descriptor: int, demand: Demand) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _LockError(f"Cannot lock a file in {tempfile.gettempdir()}: {error}.") from error
        demand.pause(_LOOK_EVERY_SEC)
