"""Directories that processes share: who fills one, who removes it, and what is left of processes that were killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.containers.owned_directory import MAKER, find_short_lived
from ares_exp.containers.shared_directory import SharedDirectory
from tests.leaks import clean

pytestmark = pytest.mark.usefixtures("temporary")

OTHER = """
from ares_exp.containers.shared_directory import SharedDirectory
held = SharedDirectory.held("key")
(held.path / "part").write_text("x")
print(held.is_full, flush=True)
input()
held.share()
print("shared", flush=True)
input()
held.release()
"""


class Other:
    """Another process that holds the directory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def goes_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ends(self) -> None:
        self.goes_on()
        self._process.wait()

    def is_killed(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def other(env: dict[str, str]) -> Iterator[Other]:
    words = [sys.executable, "-c", OTHER]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Other(process)
        process.kill()


def held() -> SharedDirectory:
    found = SharedDirectory.held("key")
    assert found is not None
    return found


def test_one_fills_it_the_last_one_removes_it(other: Other, temporary: Path) -> None:
    assert other.says() == "False"
    assert SharedDirectory.held("key") is None  # it is being filled
    other.goes_on()
    assert other.says() == "shared"
    ours = held()
    assert ours.is_full
    assert (ours.path / "part").read_text() == "x"
    other.ends()
    assert ours.path.exists()
    ours.release()
    ours.release()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_filled_in_part_is_filled_anew(other: Other, temporary: Path) -> None:
    assert other.says() == "False"
    other.is_killed()
    ours = held()
    assert not ours.is_full
    assert [file.name for file in ours.path.iterdir()] == [MAKER]
    ours.release()
    assert list(temporary.iterdir()) == []


def test_clean_removes_what_nobody_holds(other: Other, temporary: Path, env: dict[str, str]) -> None:
    assert other.says() == "False"
    other.goes_on()
    assert other.says() == "shared"
    [left] = find_short_lived()
    assert not left.is_stale
    assert left.whose == f"process {other.pid}"
    assert left.remove() == "something in it is still in use"
    other.is_killed()
    [left] = find_short_lived()
    assert left.is_stale
    clean(env)
    assert list(temporary.iterdir()) == []


def test_the_directory_of_another_user_is_refused() -> None:
    ours = held()
    ours.path.chmod(0o777)
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        SharedDirectory.held("key")
    ours.release()
