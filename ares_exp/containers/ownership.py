"""Owners of things that outlive their maker (containers, networks, images), and whether an owner is dead.

The owner is in the labels of the thing, or as a mark in its name. A process number alone is ambiguous: other machines,
boots and containers have the same ones. So the labels also name the machine, its boot, the pid namespace, and the start
time of the process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

RUN = "ares_exp.run"
"""The label on everything that a run makes."""

HOST = "ares_exp.host"
"""The label of the machine's host name, for searches. Another machine may have the same name."""

_MACHINE, _BOOT = "ares_exp.machine", "ares_exp.boot"
_NAMESPACE, _USER = "ares_exp.pid-namespace", "ares_exp.user"
_PID, _START = "ares_exp.pid", "ares_exp.process-start"
_IS_LINUX = sys.platform == "linux"
_QUESTION_SEC = 10.0


def owner_labels() -> dict[str, str]:
    """Returns the labels of this process; the value is empty where it cannot be determined."""
    return dict(_labels_of(os.getpid()))


@functools.lru_cache(maxsize=1)
def _labels_of(pid: int) -> Mapping[str, str]:
    return {
        RUN: uuid.uuid4().hex,
        HOST: socket.gethostname(),
        _MACHINE: _machine(),
        _BOOT: _boot(),
        _NAMESPACE: _namespace(),
        _USER: str(os.getuid()),
        _PID: str(pid),
        _START: _process_start(pid),
    }


def owner_mark() -> str:
    """Returns the owner mark for names of things without labels: `<process number>-<its start>-<scope digest>`.

    For things that do not survive a reboot. The scope digest covers host, boot, pid namespace and user.
    """
    labels = owner_labels()
    return f"{labels[_PID]}-{labels[_START]}-{_scope(labels)}"


def is_dead_mark(mark: str) -> bool:
    """Returns as `is_dead`, for a thing of this machine with an `owner_mark`."""
    ours = owner_labels()
    pid, _, rest = mark.partition("-")
    start, _, scope = rest.partition("-")
    return scope == _scope(ours) and is_dead({**ours, _PID: pid, _START: start})


def _scope(labels: Mapping[str, str]) -> str:
    scope = " ".join(labels[name] for name in (HOST, _BOOT, _NAMESPACE, _USER))
    return hashlib.sha256(scope.encode()).hexdigest()[:12]


def machine_mark() -> str:
    """Returns the mark of this user on this machine, for names of things without labels."""
    labels = owner_labels()
    scope = " ".join((labels[HOST], labels[_MACHINE] or f"{uuid.getnode():x}", labels[_USER]))
    return hashlib.sha256(scope.encode()).hexdigest()[:8]


def is_dead(labels: Mapping[str, str], *, since_boot: bool = False) -> bool:
    """Returns whether the owner of a thing is certainly dead and had our user. An unknown owner counts as alive.

    Certain means: the process does not exist in our pid namespace; or its machine, this one, has rebooted since.
    Blocking on macOS, where it runs `ps`.

    Args:
        labels: The labels of the thing.
        since_boot: Whether only a missing process counts. For things outside this machine: cloned machines have the
            same names, but different boots.
    """
    if not _agree(labels, HOST) or not _agree(labels, _USER) or not labels.get(_BOOT):
        return False
    if not _agree(labels, _BOOT):
        return not since_boot and bool(_boot()) and _agree(labels, _MACHINE)
    return _agree(labels, _NAMESPACE) and _is_gone(labels.get(_PID, ""), labels.get(_START, ""))


def describe(labels: Mapping[str, str]) -> str:
    """Returns `process 4711 on host`, and the user if it is another one."""
    user = "" if _agree(labels, _USER) else f" of user {labels.get(_USER) or 'unknown'}"
    return f"process {labels.get(_PID) or 'unknown'} on {labels.get(HOST) or 'an unknown host'}{user}"


def _agree(labels: Mapping[str, str], name: str) -> bool:
    """Returns whether a label is set and equal to ours."""
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
    """Returns a process's start time, which distinguishes it from a later one of the same number; empty if unknown."""
    if not _IS_LINUX:
        return _ask("ps", "-o", "lstart=", "-p", str(pid))
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, threads, start = fields[0], int(fields[17]), fields[19]
    return _ENDED if state in "ZX" and threads <= 1 else start  # a zombie: its parent has not reaped it yet


def _namespace() -> str:
    """Returns an id of the pid and time namespaces of this process."""
    if not _IS_LINUX:
        return sys.platform
    spaces = [path for path in (Path("/proc/self/ns/pid"), Path("/proc/self/ns/time")) if path.is_symlink()]
    try:
        return " ".join(str(path.readlink()) for path in spaces)
    except OSError:
        return ""


def _boot() -> str:
    if not _IS_LINUX:
        return _ask("sysctl", "-n", "kern.bootsessionuuid")
    return _read("/proc/sys/kernel/random/boot_id")


def _machine() -> str:
    """Returns a hash of the machine id, which must not be published itself (`man machine-id`)."""
    number = _read("/etc/machine-id")
    return hashlib.sha256(f"ares_exp {number}".encode()).hexdigest()[:16] if number else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _ask(*command: str) -> str:
    """Returns the output of a system program, independent of language and time zone; empty when it fails."""
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "TZ": "UTC"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_QUESTION_SEC, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(answer.stdout.split())
