"""Temporary directories that processes of one user fill once and use together; the last of them removes it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ares_exp.containers.owned_directory import MAKER, SHARED, delete, name_prefix

_FULL = "full"


class SharedDirectory:
    """One process's hold of such a directory.

    The lock is the kernel's (`flock` on the directory), exclusive while it is filled, shared while it is used: it ends
    with the process, however that dies, and `clean` removes a directory that nobody holds.

    Attributes:
        path: The directory, readable only by this user.
        is_full: Whether its contents are complete. If not, this process is the one to fill it.
    """

    def __init__(self, path: Path, descriptor: int, *, is_full: bool) -> None:

        self.path = path
        self.is_full = is_full
        self._descriptor = descriptor

    @classmethod
    def held(cls, key: str) -> SharedDirectory | None:
        """Holds the directory of a key, made if it is not there; `None` while another process fills it. Does not wait.

        Args:
            key: Tells it from others; letters and digits.

        Raises:
            OSError: It cannot be made or locked, or is not this user's alone.
        """
        path = Path(tempfile.gettempdir(), f"{name_prefix(SHARED)}u{os.geteuid()}-{key}")
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(f"{path} is not a directory of this user alone")
            if (is_full := _locked(path, descriptor)) is not None:
                if not is_full:
                    (path / MAKER).write_text(str(os.getpid()))
                return cls(path, descriptor, is_full=is_full)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def share(self) -> None:
        """Declares its contents complete: others may use it from now on.

        Raises:
            OSError: It cannot be.
        """
        (self.path / _FULL).touch()
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # who gets the lock in between finds it full
        self.is_full = True

    def release(self) -> None:
        """Ends the hold; removes the directory unless others hold it. Idempotent. Blocking."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            delete(self.path)
        except BlockingIOError:
            pass  # the last of the others removes it
        finally:
            os.close(descriptor)


def _locked(path: Path, descriptor: int) -> bool | None:
    """Locks the directory: returns whether it is full, or `None` if another process fills it or has removed it."""
    for way in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        try:
            fcntl.flock(descriptor, way | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        if not _is_there(path, descriptor):
            return None
        if (path / _FULL).exists():
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            return True if _is_there(path, descriptor) else None
        if way == fcntl.LOCK_SH:  # another process looks at it, too
            return None
        for left in path.iterdir():  # by one that died while it filled it
            delete(left) if left.is_dir() else left.unlink()
        return False
    return None


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open directory: who holds it last removes it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
