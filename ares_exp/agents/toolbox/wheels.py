"""Wheels from the Python package index that the user's pip, or uv, is configured for; unpacked, never built."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from packaging.markers import Marker

from ares_exp.agents.toolbox.package import Build, Wheels
from ares_exp.containers.archive import remove
from ares_exp.containers.parent_death_guard import while_we_live
from ares_exp.errors import ToolboxError

_TIMEOUT_SEC = 1800.0
_POLL_SEC = 0.2
_SHOWN_BYTES = 2000
_MACHINES = {"x64": "x86_64", "arm64": "aarch64"}
_ANY_PYTHON = "3.12"
"""Named where a wheel is for every Python."""


def fetch_wheels(wheels: Wheels, build: Build, target: Path, scratch: Path, *, stop: threading.Event) -> None:
    """Fetches wheels, checks them against their digests, and unpacks them for the build's Python and C library.

    Args:
        wheels: What is pinned of them.
        build: What they are for.
        target: The directory that they go to.
        scratch: A directory for files in between.
        stop: When it is set, the installer is killed.

    Raises:
        ToolboxError: They cannot be had, are not what their digests say, or there is neither pip nor uv.
    """
    python = build.python or _ANY_PYTHON
    requirements = scratch / "requirements.txt"
    requirements.write_text(requirement_lines(wheels, python))
    _run(_installer(build, python, requirements, target), build, stop)
    for name in wheels.left_out:
        remove(target / name)
    if build.python is not None:
        _compile(target, build, stop)


def requirement_lines(wheels: Wheels, python: str) -> str:
    """Returns the requirements that a minor version of Python has, without markers.

    pip evaluates markers for the Python that runs it, not for the one that it is told to install for.
    """
    text = wheels.lock
    if text.endswith(".lock"):
        text = files(__package__).joinpath(text).read_text("utf-8")
    chosen = []
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, _, hashes = entry.partition(" --hash=")
        name, _, marker = requirement.partition(";")
        if not marker.strip() or Marker(marker.strip()).evaluate(
            {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        ):
            chosen.append(f"{name.strip()} --hash={' '.join(hashes.split())}")
    return "\n".join(chosen) + "\n"


def _installer(build: Build, python: str, requirements: Path, target: Path) -> list[str]:
    common = ["--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    if importlib.util.find_spec("pip") is not None:
        platforms = [word for tag in _platforms(build) for word in ("--platform", tag)]
        return [
            *(sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms, *common),
        ]
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") is not None else None
    if uv is None and (program := shutil.which("uv")) is not None:
        uv = [program]
    if uv is None:
        raise ToolboxError(
            f"{build.name} is made of wheels, and this Python has neither pip nor uv to fetch them: "
            f"`{sys.executable} -m ensurepip`, or install uv."
        )
    libc = "unknown-linux-musl" if build.libc == "musl" else "manylinux_2_28"
    wanted = f"{_MACHINES[build.machine]}-{libc}"
    return [
        *(*uv, "pip", "install", "--only-binary", ":all:", "--link-mode=copy", "--python", sys.executable),
        *("--python-version", python, "--python-platform", wanted, *common),
    ]


def _platforms(build: Build) -> list[str]:
    machine = _MACHINES[build.machine]
    if build.libc == "musl":
        return [f"musllinux_1_{minor}_{machine}" for minor in (2, 1)]
    older = ["manylinux2014", "manylinux2010", "manylinux1"] if build.machine == "x64" else ["manylinux2014"]
    glibc = [f"manylinux_2_{minor}" for minor in (28, 27, 26, 24, 17, 12, 5)]
    return [f"{tag}_{machine}" for tag in (*glibc, *older)]


def _compile(target: Path, build: Build, stop: threading.Event) -> None:
    """Compiles modules where that Python is here: the directory is read-only later, and would be parsed every time."""
    python = sys.executable
    if build.python != f"{sys.version_info.major}.{sys.version_info.minor}":
        found = shutil.which(f"python{build.python}")
        if found is None:
            return
        python = found
    with suppress(ToolboxError):  # it works without
        options = ["-q", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(target), "-p", build.target]
        _run([python, "-I", "-m", "compileall", *options, str(target)], build, stop)


def _run(command: Sequence[str], build: Build, stop: threading.Event) -> None:
    """Runs a program that ends with this process, whatever ends that."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            while_we_live(command),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        deadline = time.monotonic() + _TIMEOUT_SEC
        try:
            while process.poll() is None and time.monotonic() < deadline and not stop.wait(_POLL_SEC):
                pass
            code = process.poll()
        finally:
            _end(process)
        said.seek(max(0, said.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        printed = said.read().decode("utf-8", "replace").strip()
    if code != 0:
        why = "it was stopped" if code is None else f"exit code {code}"
        raise ToolboxError(
            f"The wheels of {build.name} {build.version} cannot be installed ({why}). Nothing was kept. Check the "
            f"package index that pip is configured for (`pip config list`).\n{printed}"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills its process group, and closes the pipe that it waits for."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
