"""Owners of resources, and the lock between processes that do the same work."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ares_exp.containers import ownership
from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.docker.image import work_lock
from ares_exp.containers.ownership import describe, is_dead, is_dead_mark, owner_labels, owner_mark
from ares_exp.errors import ContainerStartError
from tests.unit.containers.local_containers import NAMESPACES, needs_local

ASK = """
import json
from ares_exp.containers.ownership import owner_labels
print(json.dumps(owner_labels()), flush=True)
"""
MARK = """
from ares_exp.containers.ownership import owner_mark
print(owner_mark(), flush=True)
input()
"""
NAMES = ["host", "boot", "pid-namespace", "user", "pid", "process-start"]


def start(code: str = ASK, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def labels_from(process: subprocess.Popen[str]) -> dict[str, str]:
    return json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def of_the_dead() -> dict[str, str]:
    """The labels of a process that has ended."""
    with start() as process:
        return labels_from(process)


def test_own_process_is_alive() -> None:
    assert not is_dead(owner_labels())
    assert describe(owner_labels()) == f"process {os.getpid()} on {os.uname().nodename}"


def test_exited_process_is_dead() -> None:
    with start(ASK + "input()") as process:
        labels = labels_from(process)
        assert not is_dead(labels)
        assert labels["ares_exp.run"] != owner_labels()["ares_exp.run"]
        process.communicate("\n")
    assert is_dead(labels)


def test_unreaped_process_is_dead() -> None:
    process = start()
    try:
        labels = labels_from(process)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(labels)
    finally:
        process.communicate()


def test_reused_process_number_is_dead() -> None:
    assert is_dead(owner_labels() | {"ares_exp.process-start": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_incomplete_labels_are_not_dead(of_the_dead: dict[str, str], name: str) -> None:
    assert is_dead(of_the_dead)
    assert not is_dead(of_the_dead | {f"ares_exp.{name}": ""})
    assert not is_dead({label: value for label, value in of_the_dead.items() if label != f"ares_exp.{name}"})


@pytest.mark.parametrize("name", ["host", "pid-namespace", "user"])
def test_labels_of_other_hosts_are_not_dead(of_the_dead: dict[str, str], name: str) -> None:
    assert not is_dead(of_the_dead | {f"ares_exp.{name}": "another"})


@pytest.mark.parametrize("pid", ["-1", "0", "x", "٣", "1e3", "99999999999999999999"])
def test_invalid_process_number_is_not_dead(of_the_dead: dict[str, str], pid: str) -> None:
    assert not is_dead(of_the_dead | {"ares_exp.pid": pid})


def test_labels_from_before_a_reboot_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = owner_labels() | {"ares_exp.machine": "m"}
    monkeypatch.setattr(ownership, "owner_labels", lambda: ours)
    before = ours | {"ares_exp.boot": "before", "ares_exp.pid-namespace": "another"}
    assert is_dead(before)
    assert not is_dead(before, since_boot=True)  # it may be of a machine that was cloned from this one
    assert not is_dead(before | {"ares_exp.machine": "another"})
    assert not is_dead(before | {"ares_exp.machine": ""})
    assert not is_dead(before | {"ares_exp.host": "another"})


def test_mark_shows_whether_its_process_runs() -> None:
    with start(MARK) as process:
        mark = process.stdout.readline().strip()
        assert mark.startswith(f"{process.pid}-")
        assert not is_dead_mark(mark)
        process.communicate("\n")
    assert is_dead_mark(mark)
    pid, started, place = mark.split("-")
    for other in (
        "",
        pid,
        f"{pid}-{started}",
        f"{pid}-{started}-0",
        f"{pid}--{place}",
        f"-{started}-{place}",
        f"{mark}-",
    ):
        assert not is_dead_mark(other)


def test_mark_with_reused_process_number_is_dead() -> None:
    pid, started, place = owner_mark().split("-")
    assert not is_dead_mark(f"{pid}-{started}-{place}")
    assert is_dead_mark(f"{pid}-{int(started) - 1}-{place}")


def test_empty_labels_are_not_dead() -> None:
    assert not is_dead({})
    assert describe({}) == "process unknown on an unknown host of user unknown"


@needs_local
def test_other_pid_namespace_is_not_dead() -> None:
    """Its number means another process here, or none: nothing can be known."""
    with start(ASK, *NAMESPACES, "--pid", "--fork", "--mount-proc") as process:
        labels = labels_from(process)
    assert labels["ares_exp.pid"] == "1"
    assert not is_dead(labels)


HOLDER = """
import sys
from ares_exp.containers.child_process import ChildProcess
from ares_exp.containers.docker.image import work_lock
with work_lock("one", ChildProcess()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("death", ["kill", "end"])
def test_lock_excludes_others_until_its_holder_ends(directory: Path, death: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600]
        over = ChildProcess()
        over.stop()
        with pytest.raises(ChildFailedError), work_lock("one", over):
            pass
        with work_lock("another", ChildProcess()):
            pass
        if death == "kill":
            holder.kill()
        else:
            holder.stdin.close()
        with work_lock("one", ChildProcess()):
            pass
    assert list(directory.iterdir()) == []


def test_threads_hold_a_lock_one_at_a_time(directory: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with work_lock("one", ChildProcess()):
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


def test_link_as_lock_file_is_not_followed(directory: Path) -> None:
    with work_lock("x", ChildProcess()):
        (lock,) = directory.iterdir()
    lock.symlink_to(directory / "elsewhere")
    with pytest.raises(ContainerStartError, match=r"The lock file .* cannot be used"), work_lock("x", ChildProcess()):
        pass
    assert not (directory / "elsewhere").exists()
