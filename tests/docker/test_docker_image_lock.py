from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ares_exp.containers.images.image_lock import image_lock
from ares_exp.containers.images.shared_work import Demand, WorkAbandoned
from ares_exp.errors import ContainerStartError

HOLDER = """
import sys
from ares_exp.containers.images.image_lock import image_lock
from ares_exp.containers.images.shared_work import Demand
with image_lock(sys.argv[1], Demand()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks lie during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with image_lock("first", Demand()):
        return next(tmp_path.iterdir())


def hold(name: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def ended(seconds: float) -> Demand:
    demand = Demand()
    timer = threading.Timer(seconds, demand.end)
    timer.daemon = True
    timer.start()
    return demand


@pytest.mark.parametrize("death", ["kill", "end"])
def test_it_excludes_another_process_until_that_is_gone(directory: Path, death: str) -> None:
    with hold("one") as holder:
        assert [(path.stat().st_mode & 0o777, len(path.name)) for path in directory.iterdir()] == [(0o600, 32)]
        with hold("dead") as dead:
            dead.kill()
        assert len(list(directory.iterdir())) == 2
        with pytest.raises(WorkAbandoned), image_lock("one", ended(0.3)):
            pass
        with image_lock("another", Demand()):
            pass
        if death == "kill":
            holder.kill()
        else:
            assert holder.stdin is not None
            holder.stdin.close()
        with image_lock("one", ended(30)):
            pass
    assert list(directory.iterdir()) == []


def test_many_threads_one_at_a_time(directory: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with image_lock("one", Demand()):
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


def test_a_directory_that_others_may_write_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    with (
        pytest.raises(ContainerStartError, match=r"alone, found one of user .* with mode 777"),
        image_lock("x", Demand()),
    ):
        pass


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ContainerStartError, match="Cannot open"), image_lock("x", Demand()):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []
