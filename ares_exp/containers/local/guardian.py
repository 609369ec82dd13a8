"""The guardian: a program that ensures that no process outlives a container without a PID namespace.

It starts the container's first process and adopts every process that loses its parent (`PR_SET_CHILD_SUBREAPER`). When
the first process or the run's process ends, the guardian kills all its descendants. It then removes the paths that the
container created on this machine. It runs as a script, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MADE = "made"
"""Name of the file in a container's directory that lists the paths that it created, one JSON object per line."""

MARK = "ARES_CONTAINER"
"""Environment variable of all processes of a guarded container. Its value is the directory's name."""

KILL_SEC = 10.0
"""Maximum time to wait until killed processes have ended."""

_SUBREAPER = 36
_IGNORED = (*(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM), signal.SIGPIPE, signal.SIGXFSZ)
_LOOK_EVERY_SEC = 0.002


def main(directory: Path, held: int | None, command: list[str]) -> int:
    """Runs `command`, and returns its exit code, which is 128 + n for death by signal n.

    When the command ends, or when the other end of stdin is closed, kills all processes that the command has started.
    The descriptor `held` stays open in this process, and the command does not inherit it.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphaned processes")
    if held is not None:
        os.set_inheritable(held, False)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    first = os.posix_spawn(command[0], command, os.environ, setsigdef=_IGNORED)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # so the runner sees the end of the first process's output
    poll = select.poll()
    poll.register(0, 0)  # only the hang-up, because the first process reads the data
    poll.register(wake, select.POLLIN)
    status = None
    while status is None:
        ready = dict(poll.poll())
        if wake in ready:
            os.read(wake, 4096)
        status = _reap().get(first)
        if ready.get(0, 0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
            break
    end_descendants()
    remove_made(directory, is_certain=True)
    return 0 if status is None else status


def _reap() -> dict[int, int]:
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if ended:
                return ended
            raise
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def end_descendants() -> None:
    """Kills the descendants of this process until none is left. Orphans count, because they become its children."""
    stopped: set[int] = set()
    deadline = time.monotonic() + KILL_SEC  # the kernel may keep a process alive, for example if its disk hangs
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            found = _descendants(os.getpid())
            # First, stop processes that may fork faster than this loop. SIGKILL also ends stopped processes.
            _signal(found - stopped, signal.SIGSTOP)
            if found <= stopped:
                _signal(found, signal.SIGKILL)
                time.sleep(_LOOK_EVERY_SEC)
            stopped |= found
            _reap()


def end_marked(name: str) -> bool:
    """Kills all processes whose variable `MARK` is `name`, after their guardian died. Returns whether all are gone."""
    mark, deadline = f"{MARK}={name}".encode(), time.monotonic() + KILL_SEC
    while time.monotonic() < deadline:
        found = set()
        for pid in _processes():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.add(pid)
        if not found:
            return True
        _signal(found, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_SEC)
    return False


def remove_made(directory: Path, *, is_certain: bool) -> list[str]:
    """Removes the paths that a container created on this machine, and their records in `MADE`. Blocking.

    Set `is_certain` if the container has just ended. If it is false, a path whose inode differs from its record is
    kept, because a user may have created it in the meantime. Returns the kept paths.
    """
    try:
        lines = (directory / MADE).read_text().splitlines()
    except FileNotFoundError:
        return []
    made: dict[str, dict[str, Any]] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # an incomplete last line
            record = json.loads(line)
            made[record["path"]] = record
    replaced, remaining = [], []
    for path, record in made.items():
        try:
            found = Path(path).lstat()
        except OSError:
            continue
        is_same = [found.st_dev, found.st_ino] == record["id"]
        if record["is_kept"]:
            # A link with this name may point anywhere.
            is_gone = _empty(Path(path)) if is_same and stat.S_ISDIR(found.st_mode) else True
        elif is_same or is_certain:
            is_gone = _delete(Path(path))
        else:
            replaced.append(path)
            continue
        if not is_gone:
            remaining.append(record)
    if remaining:
        fresh = directory / f"{MADE}.new"
        fresh.write_text("".join(f"{json.dumps(record)}\n" for record in remaining))
        fresh.replace(directory / MADE)
    else:
        (directory / MADE).unlink(missing_ok=True)
    return replaced


def _empty(directory: Path) -> bool:
    try:
        return not [child for child in directory.iterdir() if not _delete(child)]
    except OSError:
        return False


def _delete(path: Path) -> bool:
    """Deletes a file or directory. Returns whether it is gone. An immutable file or a busy mount cannot be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    return not os.path.lexists(path)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2] else None, sys.argv[3:]))
