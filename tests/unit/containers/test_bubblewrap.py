"""Which bubblewrap is taken, what closes a container, and what is said where it cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.containers.local.isolation import MINIMUM_VERSION, bwrap_arguments, find_bwrap, is_privileged
from tests.unit.containers.local_containers import ROOT, STEADY_MOUNTS, needs_local

pytestmark = needs_local


def found_with(path: Path) -> str:
    """The answer of `find_bwrap` in a fresh process whose PATH starts with `path`."""
    run = subprocess.run(
        [sys.executable, "-c", "from ares_exp.containers.local.isolation import find_bwrap; print(find_bwrap())"],
        env={"PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout.strip()


def program(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


def test_it_is_new_enough() -> None:
    version = subprocess.run([find_bwrap(), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    assert tuple(int(part) for part in version.split()[1].split(".")[:2]) >= MINIMUM_VERSION


def test_a_new_one_of_the_system_wins(tmp_path: Path) -> None:
    newer = program(tmp_path / "bwrap", "echo bubblewrap 0.12.1")
    assert found_with(tmp_path) == str(newer)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("echo bubblewrap 0.8.0", 0o755),
        ("echo bubblewrap 0.12.0", 0o4755),
        ("exit 1", 0o755),
        ("echo nonsense", 0o755),
        ("exec /no/such/program", 0o755),
    ],
)
def test_an_unusable_one_of_the_system_is_passed_over(tmp_path: Path, text: str, mode: int) -> None:
    program(tmp_path / "bwrap", text, mode)
    assert found_with(tmp_path) == str(find_bwrap())


def test_another_system_is_refused_with_the_remedy() -> None:
    script = (
        "import sys\n"
        "from ares_exp.containers.local.isolation import find_bwrap\n"
        "sys.platform = 'darwin'\n"
        "try: find_bwrap()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == (
        "PreflightError container=local needs Linux (bubblewrap), and this is darwin. Use container=docker.\n"
    )


def words(*, share_network: bool = False, privileged: bool = True) -> list[str]:
    return bwrap_arguments(
        ["--symlink", "usr/bin", "/bin"],
        env={"A": "1"},
        channels=Path("/c"),
        share_network=share_network,
        privileged=privileged,
    )


def test_what_closes_a_box() -> None:
    closed = words()
    for word in (
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--new-session",
        "--die-with-parent",
    ):
        assert word in closed
    assert closed[closed.index("--cap-drop") + 1] == "ALL"
    assert closed.index("--cap-drop") < closed.index("--cap-add")
    added = {closed[i + 1] for i, word in enumerate(closed) if word == "--cap-add"}
    assert not added & {f"CAP_{name}" for name in ("SYS_ADMIN", "MKNOD", "NET_ADMIN", "SYS_PTRACE", "NET_RAW")}
    assert not [word for word in closed if word.startswith("/sys")]
    assert closed.index("--proc") < closed.index("/proc/sys")


def test_network_and_users_are_shared_only_on_request() -> None:
    assert "--unshare-net" not in words(share_network=True)
    assert "--unshare-user" not in words()
    assert "--unshare-user" in words(privileged=False)


_PREFLIGHT = """
import asyncio, sys
from ares_exp.containers.local import LocalContainerFactory, factory, host_factory
factory.container_evidence = host_factory.container_evidence = lambda: None  # this machine may be a container
from ares_exp.errors import PreflightError
try:
    asyncio.run(LocalContainerFactory().preflight())
except PreflightError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.root
@pytest.mark.parametrize(
    "restriction",
    [
        ["--unshare-user", "--uid", "1234", "--gid", "1234", "--disable-userns"],
        ["--cap-drop", "ALL", "--unshare-user", "--disable-userns"],
    ],
)
def test_where_it_cannot_work_one_sentence_says_what_to_do(restriction: list[str]) -> None:
    run = subprocess.run(
        [*STEADY_MOUNTS, find_bwrap(), *restriction, "--dev-bind", "/", "/", "--", sys.executable, "-c", _PREFLIGHT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 3, run.stderr
    for part in ("container=local", "bwrap", "run as root", "container=docker"):
        assert part in run.stdout


def test_root_without_the_capability_is_not_privileged() -> None:
    assert is_privileged() == (os.geteuid() == 0 and "mount" in _abilities())


def _abilities() -> str:
    """`mount` if this process may mount, tried out."""
    run = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10, check=False)
    return "mount" if run.returncode == 0 else ""
