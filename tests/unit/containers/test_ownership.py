from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ares_exp.containers import ownership
from ares_exp.containers.ownership import describe, is_dead, is_dead_mark, owner_labels, owner_mark
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
    assert process.stdout is not None
    found: dict[str, str] = json.loads(process.stdout.readline())
    return found


@pytest.fixture(scope="module")
def of_the_dead() -> dict[str, str]:
    """The labels of a process that has ended."""
    with start() as process:
        return labels_from(process)


def test_we_live() -> None:
    assert not is_dead(owner_labels())
    assert describe(owner_labels()) == f"process {os.getpid()} on {os.uname().nodename}"


def test_a_process_lives_and_dies() -> None:
    with start(ASK + "input()") as process:
        labels = labels_from(process)
        assert not is_dead(labels)
        assert labels["ares_exp.run"] != owner_labels()["ares_exp.run"]
        process.communicate("\n")
    assert is_dead(labels)


def test_a_process_whose_exit_code_nobody_has_asked_for_is_dead() -> None:
    process = start()
    try:
        labels = labels_from(process)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(labels)
    finally:
        process.communicate()


def test_the_number_of_a_dead_process_is_given_to_another() -> None:
    assert is_dead(owner_labels() | {"ares_exp.process-start": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_known_is_not_dead(of_the_dead: dict[str, str], name: str) -> None:
    assert is_dead(of_the_dead)
    assert not is_dead(of_the_dead | {f"ares_exp.{name}": ""})
    assert not is_dead({label: value for label, value in of_the_dead.items() if label != f"ares_exp.{name}"})


@pytest.mark.parametrize("name", ["host", "pid-namespace", "user"])
def test_of_another_place_or_user_is_not_dead(of_the_dead: dict[str, str], name: str) -> None:
    assert not is_dead(of_the_dead | {f"ares_exp.{name}": "another"})


@pytest.mark.parametrize("pid", ["-1", "0", "x", "٣", "1e3", "99999999999999999999"])
def test_what_is_no_process_number_is_not_dead(of_the_dead: dict[str, str], pid: str) -> None:
    assert not is_dead(of_the_dead | {"ares_exp.pid": pid})


def test_before_this_machine_was_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = owner_labels() | {"ares_exp.machine": "m"}
    monkeypatch.setattr(ownership, "owner_labels", lambda: ours)
    before = ours | {"ares_exp.boot": "before", "ares_exp.pid-namespace": "another"}
    assert is_dead(before)
    assert not is_dead(before, since_boot=True)  # it may be of a machine that was cloned from this one
    assert not is_dead(before | {"ares_exp.machine": "another"})
    assert not is_dead(before | {"ares_exp.machine": ""})
    assert not is_dead(before | {"ares_exp.host": "another"})


def test_a_mark_says_whether_its_process_lives() -> None:
    with start(MARK) as process:
        assert process.stdout is not None
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


def test_the_number_in_a_mark_is_given_to_another() -> None:
    pid, started, place = owner_mark().split("-")
    assert not is_dead_mark(f"{pid}-{started}-{place}")
    assert is_dead_mark(f"{pid}-{int(started) - 1}-{place}")


def test_nothing_at_all() -> None:
    assert not is_dead({})
    assert describe({}) == "process unknown on an unknown host of user unknown"


@needs_local
def test_in_another_pid_namespace() -> None:
    """Its number means another process here, or none: nothing can be known."""
    with start(ASK, *NAMESPACES, "--pid", "--fork", "--mount-proc") as process:
        labels = labels_from(process)
    assert labels["ares_exp.pid"] == "1"
    assert not is_dead(labels)
