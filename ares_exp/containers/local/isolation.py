"""The isolation that this machine allows local containers, determined by a test, and why it may allow none."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ares_exp.containers.local.bubblewrap import bwrap_arguments, find_bwrap, is_privileged
from ares_exp.containers.local.mount_table import filesystem_type
from ares_exp.errors import PreflightError

Isolation = Literal["namespaces", "shared processes", "none"]
"""`namespaces`: containers have all namespaces. `shared processes`: they have the machine's PID namespace and `/proc`,
because the kernel refuses a new `/proc` where parts of the old one are masked. `none`: bubblewrap does not work."""

_PROBE_SEC = 20.0
_PROGRAMS = [Path("/", name) for name in ("usr", "bin", "lib", "lib32", "lib64", "libx32")]
_ENGINES = re.compile(r"docker|containerd|kubepods|libpod|crio|lxc|garden|buildkit|ecs/")


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine allows.

    Attributes:
        isolation: The isolation of local containers.
        problem: The reason why not all namespaces work, in bubblewrap's words; otherwise empty.
    """

    isolation: Isolation
    problem: str = ""


@functools.cache
def find_isolation() -> Machine:
    """Returns the best isolation that works. Blocking; tests it once, in some milliseconds.

    Raises:
        PreflightError: The test itself failed. The next call repeats it.
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
            f"The test of container=local failed: {reason}. Run again when the machine is less busy, or use "
            "container=host or container=docker."
        ) from error
    return Machine("none", problem)


def _try(bwrap: Path, *, share_processes: bool) -> str | None:
    """Runs a program in a small container; returns bubblewrap's message if that fails."""
    arguments = bwrap_arguments(
        [word for path in _PROGRAMS for word in _mount(path)],
        env={},
        channels=Path("/usr"),
        share_network=False,
        privileged=is_privileged(),
        share_processes=share_processes,
    )
    done = subprocess.run(
        [bwrap, *arguments, "--", "/bin/sh", "-c", ":"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath},
        start_new_session=True,
        timeout=_PROBE_SEC,
        check=False,
    )
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip()[-500:] or f"bubblewrap ended with status {done.returncode}"


def _mount(path: Path) -> list[str]:
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind-try", str(path), str(path)]


@functools.cache
def container_evidence() -> str | None:
    """Returns what shows that this machine is itself a container, as a clause; `None` if nothing does."""
    if sys.platform != "linux":
        return None
    return next(evidence(Path("/"), os.environ, filesystem_type(Path("/"))), None)


def evidence(root: Path, environment: Mapping[str, str], filesystem: str) -> Iterator[str]:
    """Yields everything that shows that a machine is a container, as clauses.

    Args:
        root: Its root directory.
        environment: The environment of this process.
        filesystem: The type of the root's file system.
    """
    for file in (".dockerenv", "run/.containerenv", "run/systemd/container"):
        if (root / file).exists():
            yield f"/{file} exists"
    variables = _content(root / "proc/1/environ").split("\0")
    yield from (f"its first process has {entry}" for entry in variables if entry.startswith("container="))
    if environment.get("KUBERNETES_SERVICE_HOST"):
        yield "KUBERNETES_SERVICE_HOST is set"
    if group := _ENGINES.search(_content(root / "proc/1/cgroup")):
        yield f"/proc/1/cgroup names {group[0]}"
    if filesystem == "overlay":
        yield "its root is an overlay"


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
