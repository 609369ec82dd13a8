"""Temporary directories of processes that live, end, and are killed."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.containers.ownership import Leftover, find_short_lived, short_lived_directory
from tests.leaks import clean

pytestmark = pytest.mark.usefixtures("temporary")

MAKER = """
from ares_exp.containers.ownership import short_lived_directory
made = [short_lived_directory(purpose) for purpose in ("build", "verifier")]
for directory in made:
    (directory.path / "file").write_text("x")
print(*(directory.path for directory in made), flush=True)
input()
"""


@pytest.fixture
def maker(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has made one of each."""
    words = [sys.executable, "-c", MAKER]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def made_by(process: subprocess.Popen[str]) -> list[Path]:
    return [Path(word) for word in process.stdout.readline().split()]


def found() -> list[Leftover]:
    return list(find_short_lived())


def test_directory_is_private_and_removed_with_its_contents(temporary: Path) -> None:
    directory = short_lived_directory("verifier")
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "below").mkdir()
    (directory.path / "below" / "file").write_text("x")
    assert [(one.name, one.is_stale) for one in found()] == [(str(directory.path), False)]
    for _ in range(2):
        directory.remove()
        assert list(temporary.iterdir()) == []


def test_directories_of_running_processes_are_kept(maker: subprocess.Popen[str], env: dict[str, str]) -> None:
    made = made_by(maker)
    assert [(one.name, one.whose, one.is_stale) for one in found()] == [
        (str(path), f"process {maker.pid}", False) for path in made
    ]
    assert f"kept       2 things of process {maker.pid}: " in clean(env)
    assert all(one.remove() for one in found())
    assert all((path / "file").exists() for path in made)


def test_directories_of_a_killed_process_are_removed(
    maker: subprocess.Popen[str], env: dict[str, str], temporary: Path
) -> None:
    made = made_by(maker)
    maker.kill()
    maker.wait()
    said = clean(env).splitlines()
    for path in made:
        assert [line for line in said if line.startswith(f"directory      {path}  of process {maker.pid}, made ")]
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="there are no local containers elsewhere")
def test_next_local_run_removes_stale_directories(maker: subprocess.Popen[str]) -> None:
    from ares_exp.containers.local.container_directory import remove_stale

    made = made_by(maker)
    remove_stale()
    assert all((path / "file").exists() for path in made)
    maker.kill()
    maker.wait()
    remove_stale()
    assert not any(path.exists() for path in made)


def test_old_unlocked_directory_is_stale(temporary: Path) -> None:
    unlocked = temporary / ".ares_exp-build-123-abc"
    unlocked.mkdir()
    assert [one.is_stale for one in found()] == [False]
    os.utime(unlocked, (time.time() - 3600,) * 2)
    assert [one.is_stale for one in found()] == [True]


def test_foreign_files_are_kept(temporary: Path) -> None:
    (temporary / "outside").mkdir()
    (temporary / "outside" / "precious").touch()
    (temporary / "ares_exp-build-1-link").symlink_to(temporary / "outside")
    (temporary / "ares_exp-build-1-file").touch()
    if os.geteuid() == 0:
        (temporary / "ares_exp-build-1-theirs").mkdir()
        os.chown(temporary / "ares_exp-build-1-theirs", 12345, 12345)
    assert not any(one.is_stale for one in found())
    for one in found():
        one.remove()
    assert (temporary / "ares_exp-build-1-link").is_symlink()
    assert (temporary / "ares_exp-build-1-file").exists()
    assert (temporary / "outside" / "precious").exists()
