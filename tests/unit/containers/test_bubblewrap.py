"""Which bubblewrap is taken, what closes a container, and what is said where it cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.containers.local.isolation import MINIMUM_VERSION, bwrap_arguments, find_bwrap, is_privileged
from ares_exp.errors import PreflightError
from tests.unit.containers.local_containers import ROOT, STEADY_MOUNTS, needs_local

pytestmark = needs_local


def found_with(program: Path, text: str, monkeypatch: pytest.MonkeyPatch, mode: int = 0o755) -> Path:
    """What is found where this program is the first `bwrap` in PATH."""
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(mode)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return find_bwrap.__wrapped__()


def test_it_is_new_enough() -> None:
    version = subprocess.run([find_bwrap(), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    assert tuple(int(part) for part in version.split()[1].split(".")[:2]) >= MINIMUM_VERSION


def test_a_new_one_of_the_system_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = tmp_path / "bwrap"
    assert found_with(newer, "echo bubblewrap 0.12.1", monkeypatch) == newer


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
def test_an_unusable_one_of_the_system_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mode: int
) -> None:
    usable = find_bwrap()
    assert found_with(tmp_path / "bwrap", text, monkeypatch, mode) == usable


def test_another_system_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PreflightError, match=r"needs Linux .*, and this is darwin\. Use container=docker\."):
        find_bwrap.__wrapped__()


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
