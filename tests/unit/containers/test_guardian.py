"""The guardian of containers without a PID namespace, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.containers.local import guardian
from ares_exp.containers.local.guardian import MADE, MARK, end_marked, remove_made

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")

_ID = os.getpid()  # tells the processes of this test process from others
_DAEMONS = f"""
(setsid sleep 4501.{_ID} &)
( ( setsid env -i sleep 4502.{_ID} & ) & )
sleep 4503.{_ID} &
sh -c 'trap "" TERM HUP; sleep 4504.{_ID}' &
until [ "$(pgrep -c -f '^sleep 450[1-4].{_ID}$')" = 4 ]; do sleep 0.01; done
pkill -STOP -f '^sleep 4503.{_ID}$'
echo ready
"""


def sleeping(pattern: str = "450[1-4]") -> list[str]:
    command = ["pgrep", "-f", f"^sleep {pattern}.{_ID}$"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


@contextlib.contextmanager
def guarded(directory: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", guardian.__file__, str(directory), "/bin/sh", "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, MARK: directory.name}
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            end_marked(directory.name)


def record(directory: Path, path: Path, *, is_kept: bool = False, replaced: bool = False) -> None:
    found = path.lstat()
    line = {"path": str(path), "is_kept": is_kept, "id": [found.st_dev, found.st_ino + replaced]}
    with (directory / MADE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_guardian_kills_daemons_when_runner_ends(tmp_path: Path) -> None:
    (made := tmp_path / "created").mkdir()
    (made / "file").touch()
    record(tmp_path, made)
    with guarded(tmp_path, f"{_DAEMONS} read -r _; sleep 60") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(sleeping()) >= 4
        process.stdin.close()
        process.wait(20)
        assert sleeping() == []
    assert not made.exists()
    assert not (tmp_path / MADE).exists()


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -TERM $$", 143)])
def test_guardian_kills_daemons_when_first_process_ends(tmp_path: Path, end: str, code: int) -> None:
    with guarded(tmp_path, f"{_DAEMONS} {end}") as process:
        assert process.wait(20) == code
        assert sleeping() == []


def test_guardian_ignores_signals_but_its_commands_do_not(tmp_path: Path) -> None:
    script = "kill -TERM $PPID; kill -INT $PPID; yes | head -c 10 >/dev/null; sh -c 'kill -PIPE $$'; exit $?"
    with guarded(tmp_path, script) as process:
        assert process.wait(20) == 128 + signal.SIGPIPE


def test_guardian_reaps_orphans(tmp_path: Path) -> None:
    script = "(true &); (true &); (true &); while pgrep -P $PPID -x true; do :; done; echo reaped; read -r _"
    with guarded(tmp_path, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reaped\n"


def test_marked_processes_end_without_their_guardian(tmp_path: Path) -> None:
    started = f"until pgrep -f '^sleep 4511.{_ID}$'; do :; done >/dev/null; echo ready; sleep 60"
    script = f"(setsid sleep 4511.{_ID} &); {started}"
    with guarded(tmp_path, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        process.wait(20)
        assert sleeping("4511") != []
        assert end_marked(tmp_path.name)
        assert sleeping("4511") == []


def test_replaced_path_is_kept_unless_container_just_ended(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (mine := tmp_path / "mine").mkdir()
    record(directory, mine, replaced=True)
    assert remove_made(directory, is_certain=False) == [str(mine)]
    assert mine.exists()
    assert (directory / MADE).exists()
    assert remove_made(directory, is_certain=True) == []
    assert not mine.exists()


def test_directory_that_existed_is_emptied_and_kept(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (existing := tmp_path / "existing").mkdir()
    record(directory, existing, is_kept=True)
    (existing / "sub").mkdir()
    (existing / "link").symlink_to(tmp_path)
    assert remove_made(directory, is_certain=False) == []
    assert list(existing.iterdir()) == []


def test_link_in_place_of_a_kept_directory_is_not_followed(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (existing := tmp_path / "existing").mkdir()
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").touch()
    record(directory, existing, is_kept=True)
    existing.rmdir()
    existing.symlink_to(precious)
    assert remove_made(directory, is_certain=True) == []
    assert (precious / "file").exists()


def test_torn_record_does_not_stop_removal(tmp_path: Path) -> None:
    (made := tmp_path / "created").touch()
    record(tmp_path, made)
    with (tmp_path / MADE).open("a") as file:
        file.write('{"path": "/et')
    assert remove_made(tmp_path, is_certain=False) == []
    assert not made.exists()


def test_fork_bomb_is_ended(tmp_path: Path) -> None:
    one = f"(while :; do sleep 4521.{_ID} & sleep 0.01; kill $!; done) &"
    bomb = f"i=0; while [ $i -lt 30 ]; do {one} i=$((i + 1)); done; sleep 0.3; echo ready; sleep 60"
    with guarded(tmp_path, bomb) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = time.monotonic()
        process.stdin.close()
        process.wait(60)
        assert time.monotonic() - started < 60
        assert sleeping("4521") == []
