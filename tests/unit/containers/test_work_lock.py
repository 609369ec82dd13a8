"""The lock between processes that do the same work."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ares_exp.containers.images.shared_work import Demand, WorkAbandoned, work_lock
from ares_exp.errors import ContainerStartError

HOLDER = """
import sys
from ares_exp.containers.images.shared_work import Demand, work_lock
with work_lock("one", Demand()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of lock files during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("death", ["kill", "end"])
def test_a_lock_excludes_others_until_its_holder_ends(directory: Path, death: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600]
        over = Demand()
        over.end()
        with pytest.raises(WorkAbandoned), work_lock("one", over):
            pass
        with work_lock("another", Demand()):
            pass
        if death == "kill":
            holder.kill()
        else:
            holder.stdin.close()
        with work_lock("one", Demand()):
            pass
    assert list(directory.iterdir()) == []


def test_threads_hold_a_lock_one_at_a_time(directory: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with work_lock("one", Demand()):
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    assert list(directory.iterdir()) == []


def test_a_link_in_place_of_a_lock_file_is_not_followed(directory: Path) -> None:
    with work_lock("x", Demand()):
        (lock,) = directory.iterdir()
    lock.symlink_to(directory / "elsewhere")
    with pytest.raises(ContainerStartError, match=r"The lock file .* cannot be used"), work_lock("x", Demand()):
        pass
    assert not (directory / "elsewhere").exists()
