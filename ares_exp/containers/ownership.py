"""Labels and names that identify the owner of a resource, so that resources of dead processes can be removed.

A resource, such as a container, a network or an image, can outlive its owner, the process that created it. The
resource's labels or name identify the owner. A process number is not unique: other machines, later boots and containers
use the same numbers. So the labels contain the machine, boot, pid namespace, process number and start time. A temporary
directory has a lock instead, which the kernel releases when the creator ends (`OwnedDirectory`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from ares_exp.cancellation import finish, in_thread


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """A resource that a run created, in this process or in another one. It may still be in use (see `is_stale`).

    Attributes:
        kind: `container`, `network`, `volume`, `image`, `directory`, `cgroup`, `sandbox`, `snapshot` or `cache`.
        name: Name of the resource on the engine, at the service or in the file system.
        whose: Description of the owner for messages, for example `process 4711 on host`.
        is_stale: Whether the resource may be removed, because its owner is certainly dead or no process uses it.
        created: Creation time, seconds since the epoch; `None` if unknown.
        remove: Function that removes the resource. It returns `""`, or the reason why the removal failed. It blocks and
            never raises.
        size: Size in bytes, including data shared with other resources; `None` if unknown.
    """

    kind: str
    name: str
    whose: str
    is_stale: bool
    created: float | None
    remove: Callable[[], str]
    size: int | None = None


SWEEP_SEC = 20.0
"""Time limit for removing leftovers of dead runs when a run starts. The next run removes the rest."""

_logger = logging.getLogger(__name__)


def remove_stale(leftovers: Iterable[Leftover]) -> int:
    """Removes the leftovers of dead runs, within `SWEEP_SEC`, and logs each removal. Returns their number. Blocking."""
    deadline = time.monotonic() + SWEEP_SEC
    stale = [leftover for leftover in leftovers if leftover.is_stale]
    removed = 0
    for count, leftover in enumerate(stale):
        if time.monotonic() > deadline:
            _logger.warning("%d leftovers of dead runs remain, because removals take too long.", len(stale) - count)
            break
        problem = leftover.remove()
        removed += not problem
        log_removal(leftover, problem)
    return removed


def log_removal(leftover: Leftover, problem: str) -> None:
    """Logs the removal of a leftover of a dead run. `problem` is the reason why the removal failed, or empty."""
    what, problem = (leftover.kind, leftover.name, leftover.whose), problem.rstrip(".")
    if not problem:
        _logger.info("Removed the %s %s, because its owner (%s) no longer runs.", *what)
    elif leftover.kind == "image":  # often because another container uses it
        _logger.info("The %s %s, whose owner (%s) no longer runs, was not removed: %s.", *what, problem)
    else:
        _logger.warning("The %s %s, whose owner (%s) no longer runs, could not be removed: %s.", *what, problem)


def created_sec(created: object) -> float | None:
    """Converts a creation time (a number of seconds or an ISO date) to seconds since the epoch; `None` if unknown."""
    if isinstance(created, int):
        return float(created)
    try:
        return datetime.datetime.fromisoformat(str(created)).timestamp()
    except (ValueError, OverflowError):
        return None


NAME_PREFIX = "ares-exp-"
"""Name prefix of our containers. It marks them more reliably than labels, which `docker commit` copies to images."""


def unique_name(task: str) -> str:
    """Creates a unique name for a container or compose project of a task: lower-case letters, digits and hyphens."""
    slug = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")[:40] or "task"
    return f"{NAME_PREFIX}{slug}-{secrets.token_hex(6)}"


RUN = "ares_exp.run"
"""Name of a label on all resources of a run. Its value identifies the process of the run."""

HOST = "ares_exp.host"
"""Name of the label with the machine's host name, for filtered searches. Other machines may have the same host name."""

_MACHINE, _BOOT = "ares_exp.machine", "ares_exp.boot"
_NAMESPACE, _USER = "ares_exp.pid-namespace", "ares_exp.user"
_PID, _START = "ares_exp.pid", "ares_exp.process-start"
_IS_LINUX = sys.platform == "linux"
_QUESTION_SEC = 10.0


def owner_labels() -> dict[str, str]:
    """Returns the labels that identify this process as the owner of a resource. Unknown values are empty."""
    return dict(_labels_of(os.getpid()))


@functools.lru_cache(maxsize=1)
def _labels_of(pid: int) -> Mapping[str, str]:
    number = read_if_readable(Path("/etc/machine-id"))  # must not be published itself (`man machine-id`)
    return {
        RUN: uuid.uuid4().hex,
        HOST: socket.gethostname(),
        _MACHINE: hashlib.sha256(f"ares_exp {number}".encode()).hexdigest()[:16] if number else "",
        _BOOT: _boot(),
        _NAMESPACE: _namespace(),
        _USER: str(os.getuid()),
        _PID: str(pid),
        _START: _process_start(pid),
    }


def owner_mark() -> str:
    """Returns `<pid>-<process start>-<digest of host, boot, pid namespace and user>`, for the name of a resource.

    Use it only for resources that cannot have labels and that do not survive a reboot.
    """
    labels = owner_labels()
    return f"{labels[_PID]}-{labels[_START]}-{_scope(labels)}"


def is_dead_mark(mark: str) -> bool:
    """Returns whether the process that created the identifier `mark` with `owner_mark` is certainly dead."""
    ours = owner_labels()
    pid, _, rest = mark.partition("-")
    start, _, scope = rest.partition("-")
    return scope == _scope(ours) and is_dead({**ours, _PID: pid, _START: start})


def _scope(labels: Mapping[str, str]) -> str:
    scope = " ".join(labels[name] for name in (HOST, _BOOT, _NAMESPACE, _USER))
    return hashlib.sha256(scope.encode()).hexdigest()[:12]


def machine_mark() -> str:
    """Returns an identifier of this user on this machine, for the names of resources that cannot have labels."""
    labels = owner_labels()
    scope = " ".join((labels[HOST], labels[_MACHINE] or f"{uuid.getnode():x}", labels[_USER]))
    return hashlib.sha256(scope.encode()).hexdigest()[:8]


def is_dead(labels: Mapping[str, str], *, since_boot: bool = False) -> bool:
    """Returns whether the owner of a resource is certainly dead. Owners of other users never count as dead.

    An owner is certainly dead if it ran in our pid namespace and no longer exists, or if it ran before the last reboot
    of this machine. With `since_boot`, owners from before the reboot do not count as dead. Set it for resources outside
    this machine, whose owner may run on a clone of this machine (same name, another boot id). Blocking on macOS.
    """
    if not _agree(labels, HOST) or not _agree(labels, _USER) or not labels.get(_BOOT):
        return False
    if not _agree(labels, _BOOT):
        return not since_boot and bool(_boot()) and _agree(labels, _MACHINE)
    return _agree(labels, _NAMESPACE) and _is_gone(labels.get(_PID, ""), labels.get(_START, ""))


def describe(labels: Mapping[str, str]) -> str:
    """Returns a description of an owner, such as `process 4711 on host`. Names the user unless it is this user."""
    user = "" if _agree(labels, _USER) else f" of user {labels.get(_USER) or 'unknown'}"
    return f"process {labels.get(_PID) or 'unknown'} on {labels.get(HOST) or 'an unknown host'}{user}"


def _agree(labels: Mapping[str, str], name: str) -> bool:
    return bool(labels.get(name)) and labels.get(name) == owner_labels()[name]


def _is_gone(pid: str, start: str) -> bool:
    if not re.fullmatch(r"[0-9]{1,9}", pid) or int(pid) == 0 or not start:
        return False
    try:
        os.kill(int(pid), 0)  # unlike /proc, which may hide other users' processes
    except ProcessLookupError:
        return True
    except OSError:
        pass
    now = _process_start(int(pid))
    return now == _ENDED or (bool(now) and now != start)


_ENDED = "ended"


def _process_start(pid: int) -> str:
    """Returns the start time of a process, which distinguishes it from a later process with the same number.

    Returns `_ENDED` if the process has ended but is still in the process table, and `""` if the time is unknown.
    """
    if not _IS_LINUX:
        return _ask("ps", "-o", "lstart=", "-p", str(pid))
    fields = read_if_readable(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if not fields:
        return ""
    state, threads, start = fields[0], int(fields[17]), fields[19]
    return _ENDED if state in "ZX" and threads <= 1 else start  # a zombie: its parent has not reaped it yet


def _namespace() -> str:
    if not _IS_LINUX:
        return sys.platform
    spaces = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/time"))
    with suppress(OSError):
        return " ".join(str(path.readlink()) for path in spaces if path.is_symlink())
    return ""


def _boot() -> str:
    if _IS_LINUX:
        return read_if_readable(Path("/proc/sys/kernel/random/boot_id"))
    return _ask("sysctl", "-n", "kern.bootsessionuuid")


def read_if_readable(path: Path) -> str:
    """Returns the text of a file without surrounding white space, or `""` if the file cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _ask(*command: str) -> str:
    """Returns the output of a system program, in English and UTC; empty if the program fails."""
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "TZ": "UTC"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_QUESTION_SEC, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(answer.stdout.split())


_UNLOCKED_SEC = 60.0  # a new directory gets its lock much sooner
ShortLived = Literal["agent", "build", "fork", "host", "transfer", "verifier", "wandb"]
"""Purposes of short-lived directories. The name of a directory contains its purpose."""


def name_prefix(purpose: str) -> str:
    """Returns the first part of directory names for a purpose. In a full name, the creator's process number follows."""
    return f"ares_exp-{purpose}-"


def delete(path: Path) -> bool:
    """Deletes a directory. Returns whether the directory no longer exists."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


class OwnedDirectory:
    """A temporary directory with a lock (`flock`), by which other processes see that its creator is alive.

    The kernel releases the lock even after `kill -9`. Unlike process numbers, locks also work across pid namespaces.
    """

    def __init__(self, prefix: str, folder: Path | None = None, delete: Callable[[Path], object] = delete) -> None:
        """Creates and locks the directory. `remove` calls `delete` with its path."""
        self._delete = delete
        fresh = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=folder))
        self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Rename only after locking: a clean-up treats an unlocked directory as stale.
        self.path = fresh.rename(fresh.with_name(fresh.name[1:]))

    def remove(self) -> None:
        """Deletes the directory with its contents. Idempotent."""
        self._delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def locked(path: Path, flags: int) -> Iterator[int]:
    """Opens a file or directory with `os.open`, locks it exclusively for the `with` block, and yields its descriptor.

    Raises `BlockingIOError` if another process holds the lock, and `OSError` if the path cannot be locked.
    """
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def short_lived_directory(purpose: ShortLived) -> OwnedDirectory:
    """Creates a temporary directory for one operation of this process. The caller must remove it afterwards."""
    return OwnedDirectory(f"{name_prefix(purpose)}{os.getpid()}-")


@asynccontextmanager
async def working_directory(purpose: ShortLived) -> AsyncIterator[Path]:
    """Creates a `short_lived_directory` for the `with` block, and removes it at the end of the block."""
    made: list[OwnedDirectory] = []
    try:
        await in_thread(lambda: made.append(short_lived_directory(purpose)))
        yield made[0].path
    finally:
        for directory in made:
            await finish(asyncio.to_thread(directory.remove))


def find_short_lived() -> Iterator[Leftover]:
    """Yields this user's short-lived directories as leftovers, including directories of running processes. Blocking."""
    for purpose in get_args(ShortLived):
        yield from find_directories(purpose, delete, [Path(tempfile.gettempdir())])


def find_directories(purpose: str, delete: Callable[[Path], bool], folders: Iterable[Path]) -> Iterator[Leftover]:
    """Yields this user's directories for a purpose in `folders`, including directories of running processes. Blocking.

    `delete` deletes one directory, and returns whether it is gone.
    """
    prefix = name_prefix(purpose)
    for path in (path for folder in folders for mark in ("", ".") for path in sorted(folder.glob(f"{mark}{prefix}*"))):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid():
                pid = re.match(r"\d+", path.name.partition(prefix)[2])
                yield Leftover(
                    kind="directory",
                    name=str(path),
                    whose=f"process {pid[0] if pid else 'unknown'}",
                    is_stale=_when_stale(path),
                    created=status.st_mtime,
                    remove=functools.partial(_remove, path, delete),
                )


def _when_stale(path: Path, then: Callable[[Path], bool] | None = None) -> bool:
    """Returns whether a directory's creator is dead. If so, and if `then` is set, returns the result of `then`."""
    try:
        with locked(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
            found = os.fstat(descriptor)
            is_fresh = path.name.startswith(".") and time.time() - found.st_mtime < _UNLOCKED_SEC
            return not is_fresh and found.st_uid == os.geteuid() and (then is None or then(path))
    except OSError:
        return False


def _remove(path: Path, delete: Callable[[Path], bool]) -> str:
    return "" if _when_stale(path, delete) or not path.exists() else "it is still in use"
