"""The guardian of containers without a PID namespace, with real processes."""

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
from ares_exp.containers.local.container_directory import delete
from ares_exp.containers.local.container_process import ContainerProcess, Launch
from ares_exp.containers.local.guardian import MADE, MARK, end_marked, remove_made
from tests.leaks import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")

_ID = os.getpid()  # tells the processes of this test process from others
_DAEMON_NUMBERS = (4501, 4502, 4503, 4504)
_DAEMONS = f"""
(setsid sleep 4501.{_ID} &)
( ( setsid env -i sleep 4502.{_ID} & ) & )
sleep 4503.{_ID} &
sh -c 'trap "" TERM HUP; sleep 4504.{_ID}' &
read -r _
"""


def sleeping(*numbers: int) -> dict[int, int]:
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
            for number in numbers:
                if words[:2] == [b"sleep", f"{number}.{_ID}".encode()]:
                    found[number] = int(path.name)
    return found


def children(parent: int) -> int:
    """Counts the children of a process, those that it has not reaped included."""
    count = 0
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            stat = (path / "stat").read_text() if path.name.isdigit() else ""
            count += stat.rpartition(")")[2].split()[1:2] == [str(parent)]
    return count


def start_daemons() -> None:
    assert wait_until(lambda: len(sleeping(*_DAEMON_NUMBERS)) == len(_DAEMON_NUMBERS))
    os.kill(sleeping(4503)[4503], signal.SIGSTOP)


@contextlib.contextmanager
def guarded(directory: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", guardian.__file__, str(directory), "", "/bin/sh", "-c", script]
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
    with guarded(tmp_path, f"{_DAEMONS} sleep 60") as process:
        start_daemons()
        process.stdin.close()
        process.wait(20)
        assert sleeping(*_DAEMON_NUMBERS) == {}
    assert not made.exists()
    assert not (tmp_path / MADE).exists()


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -TERM $$", 143)])
def test_guardian_kills_daemons_when_first_process_ends(tmp_path: Path, end: str, code: int) -> None:
    with guarded(tmp_path, f"{_DAEMONS} {end}") as process:
        start_daemons()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(20) == code
        assert sleeping(*_DAEMON_NUMBERS) == {}


def test_guardian_ignores_signals_but_its_commands_do_not(tmp_path: Path) -> None:
    script = "kill -TERM $PPID; kill -INT $PPID; yes | head -c 10 >/dev/null; sh -c 'kill -PIPE $$'; exit $?"
    with guarded(tmp_path, script) as process:
        assert process.wait(20) == 128 + signal.SIGPIPE


def test_guardian_reaps_orphans(tmp_path: Path) -> None:
    with guarded(tmp_path, "(true &); (true &); (true &); echo done; read -r _") as process:
        assert process.stdout.readline() == b"done\n"
        assert wait_until(lambda: children(process.pid) == 1)


def test_marked_processes_end_without_their_guardian(tmp_path: Path) -> None:
    with guarded(tmp_path, f"(setsid sleep 4511.{_ID} &); sleep 60") as process:
        assert wait_until(lambda: bool(sleeping(4511)))
        process.kill()
        process.wait(20)
        assert sleeping(4511) != {}
        assert end_marked(tmp_path.name)
        assert sleeping(4511) == {}


def test_replaced_path_is_kept_unless_container_just_ended(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (mine := tmp_path / "mine").mkdir()
    record(directory, mine, replaced=True)
    assert remove_made(directory, is_certain=False) == [str(mine)]
    assert mine.exists()
    assert not (directory / MADE).exists()
    record(directory, mine, replaced=True)
    assert remove_made(directory, is_certain=True) == []
    assert not mine.exists()


def test_replaced_path_is_reported_by_name_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory := tmp_path / "container").mkdir()
    (mine := tmp_path / "mine").mkdir()
    record(directory, mine, replaced=True)
    assert delete(directory)
    assert [one.getMessage() for one in caplog.records] == [
        f"{mine} is from a killed run, unless another program has replaced it. Remove it if you do not need it."
    ]
    assert mine.exists()
    assert not directory.exists()


def test_directory_that_existed_is_emptied_and_kept(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (existing := tmp_path / "existing").mkdir()
    record(directory, existing, is_kept=True)
    (existing / "sub").mkdir()
    (existing / "link").symlink_to(tmp_path)
    assert remove_made(directory, is_certain=False) == []
    assert list(existing.iterdir()) == []


def test_link_replacing_kept_directory_is_not_followed(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (existing := tmp_path / "existing").mkdir()
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").touch()
    record(directory, existing, is_kept=True)
    existing.rmdir()
    existing.symlink_to(precious)
    assert remove_made(directory, is_certain=True) == []
    assert (precious / "file").exists()


@pytest.mark.root
def test_busy_mounts_do_not_stop_the_removal(tmp_path: Path) -> None:
    (directory := tmp_path / "container").mkdir()
    (busy := tmp_path / "busy").touch()
    (existing := tmp_path / "existing").mkdir()
    (existing / "busy").touch()
    (existing / "other").touch()
    (made := tmp_path / "made").touch()
    for path in (busy, existing, made):
        record(directory, path, is_kept=path == existing)
    remove = "import sys; from pathlib import Path; from ares_exp.containers.local.guardian import remove_made"
    remove += "; remove_made(Path(sys.argv[1]), is_certain=True)"
    mount = 'mount --bind "$1" "$1" && mount --bind "$2" "$2" && exec "$3" -c "$4" "$5"'
    words = ("unshare", "--mount", "/bin/sh", "-c", mount, "sh", busy, existing / "busy")
    subprocess.run((*words, sys.executable, remove, directory), check=True)
    remaining = [json.loads(line)["path"] for line in (directory / MADE).read_text().splitlines()]
    assert remaining == [str(busy), str(existing)]
    assert not made.exists()
    assert [path.name for path in existing.iterdir()] == ["busy"]


async def test_runner_waits_for_a_slow_guardian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import pathlib, subprocess, sys, time; subprocess.call(sys.argv[3:]); time.sleep(1.5)"
    (script := tmp_path / "slow.py").write_text(f"{slow}; pathlib.Path(sys.argv[1], 'finished').touch()")
    (tmp_path / "channels").mkdir()
    monkeypatch.setattr(guardian, "__file__", str(script))
    process = await ContainerProcess.launch(Launch(tmp_path, is_guarded=True, env={"PATH": os.defpath}))
    await process.kill()
    assert not process.is_running
    assert (tmp_path / "finished").exists()


def test_torn_record_does_not_stop_removal(tmp_path: Path) -> None:
    (made := tmp_path / "created").touch()
    record(tmp_path, made)
    with (tmp_path / MADE).open("a") as file:
        file.write('{"path": "/et')
    assert remove_made(tmp_path, is_certain=False) == []
    assert not made.exists()


def test_processes_are_killed_once_all_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that forks faster than the guardian looks would otherwise outlive it."""
    found, sent = [{11}, {11, 12}, {11, 12}], []

    def reap() -> None:
        if not found:
            raise ChildProcessError

    monkeypatch.setattr(guardian, "_descendants", lambda root: found.pop(0))
    monkeypatch.setattr(guardian, "_signal", lambda pids, number: sent.append((number, sorted(pids))))
    monkeypatch.setattr(guardian, "_reap", reap)
    guardian.end_descendants()
    stopped = [(signal.SIGSTOP, [11]), (signal.SIGSTOP, [12])]
    assert [one for one in sent if one[1]] == [*stopped, (signal.SIGKILL, [11, 12])]


def test_fork_bomb_is_ended(tmp_path: Path) -> None:
    one = f"(while :; do sleep 4521.{_ID} & sleep 0.01; kill $!; done) &"
    bomb = f"i=0; while [ $i -lt 30 ]; do {one} i=$((i + 1)); done; sleep 0.3; echo ready; sleep 60"
    with guarded(tmp_path, bomb) as process:
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        started = time.monotonic()
        process.stdin.close()
        process.wait(60)
        assert time.monotonic() - started < 60
        assert sleeping(4521) == {}
