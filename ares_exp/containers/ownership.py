"""Whose a thing is that outlives its maker: a container, a network, an image. And whether that owner is dead.

Labels carry the answer, or a mark in its name. A process number alone says little: another machine, another boot and
another container have the same ones. So the labels also name the machine, its boot, the namespace in which process
numbers mean the same, and when the process started.
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
"""The label that every thing of a run has."""

HOST = "ares_exp.host"
"""The label that things of a machine have in common, for a search. Another machine may have it too."""

_MACHINE, _BOOT = "ares_exp.machine", "ares_exp.boot"
_NAMESPACE, _USER = "ares_exp.pid-namespace", "ares_exp.user"
_PID, _START = "ares_exp.pid", "ares_exp.process-start"
_IS_LINUX = sys.platform == "linux"
_QUESTION_SEC = 10.0


def owner_labels() -> dict[str, str]:
    """Labels of what this process makes. An empty one: it cannot be found out here."""
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
    """Tells whose a thing is that has a name but no labels: `<process number>-<its start>-<where these mean the same>`.

    For what ends with the boot of the machine.
    """
    labels = owner_labels()
    return f"{labels[_PID]}-{labels[_START]}-{_place(labels)}"


def is_dead_mark(mark: str) -> bool:
    """As `is_dead`, for a thing of this machine with an `owner_mark`."""
    ours = owner_labels()
    pid, _, rest = mark.partition("-")
    start, _, place = rest.partition("-")
    return place == _place(ours) and is_dead({**ours, _PID: pid, _START: start})


def _place(labels: Mapping[str, str]) -> str:
    place = " ".join(labels[name] for name in (HOST, _BOOT, _NAMESPACE, _USER))
    return hashlib.sha256(place.encode()).hexdigest()[:12]


def machine_mark() -> str:
    """Tells the things of this user on this machine from those of others, where only a name can say so."""
    labels = owner_labels()
    place = " ".join((labels[HOST], labels[_MACHINE] or f"{uuid.getnode():x}", labels[_USER]))
    return hashlib.sha256(place.encode()).hexdigest()[:8]


def is_dead(labels: Mapping[str, str], *, since_boot: bool = False) -> bool:
    """Whether the owner of a thing is certainly dead, and was of our user. What cannot be known counts as alive.

    Certain is: the process is not there, where its number and ours mean the same; or its machine, this one, has been
    started anew since. Blocking on macOS, where it asks `ps`.

    Args:
        labels: Of the thing.
        since_boot: Whether only the former counts. For things outside of this machine: machines that are copies of each
            other have the same names, but each has a boot of its own.
    """
    if not _agree(labels, HOST) or not _agree(labels, _USER) or not labels.get(_BOOT):
        return False
    if not _agree(labels, _BOOT):
        return not since_boot and bool(_boot()) and _agree(labels, _MACHINE)
    return _agree(labels, _NAMESPACE) and _is_gone(labels.get(_PID, ""), labels.get(_START, ""))


def describe(labels: Mapping[str, str]) -> str:
    """`process 4711 on host`, and the user where it is another one."""
    user = "" if _agree(labels, _USER) else f" of user {labels.get(_USER) or 'unknown'}"
    return f"process {labels.get(_PID) or 'unknown'} on {labels.get(HOST) or 'an unknown host'}{user}"


def _agree(labels: Mapping[str, str], name: str) -> bool:
    """Whether a label is known and the same as ours."""
    return bool(labels.get(name)) and labels.get(name) == owner_labels()[name]


def _is_gone(pid: str, start: str) -> bool:
    if not re.fullmatch(r"[0-9]{1,9}", pid) or int(pid) == 0 or not start:
        return False
    try:
        os.kill(int(pid), 0)  # unlike /proc, which may hide the processes of others, it tells whether there is one
    except ProcessLookupError:
        return True
    except OSError:
        pass
    now = _process_start(int(pid))
    return now == _ENDED or (bool(now) and now != start)


_ENDED = "ended"


def _process_start(pid: int) -> str:
    """When a process started, which tells it from a later one of the same number; empty when that is not to be had."""
    if not _IS_LINUX:
        return _ask("ps", "-o", "lstart=", "-p", str(pid))
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, threads, start = fields[0], int(fields[17]), fields[19]
    return _ENDED if state in "ZX" and threads <= 1 else start  # a zombie: nobody has asked for its exit code yet


def _namespace() -> str:
    """The same for two processes to which process numbers, and the clock of their start, mean the same."""
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
    """Tells machines of the same name apart. Hashed: the number itself is not for others to see (`man machine-id`)."""
    number = _read("/etc/machine-id")
    return hashlib.sha256(f"ares_exp {number}".encode()).hexdigest()[:16] if number else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _ask(*command: str) -> str:
    """What a program of the system says, the same in every language and time zone; empty when it fails."""
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "TZ": "UTC"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_QUESTION_SEC, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(answer.stdout.split())
