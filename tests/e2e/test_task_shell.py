"""`ares-exp task shell`, typed into through a pipe and through a terminal."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import SECRET_FREE, Cli
from tests.leaks import processes, wait_until
from tests.warm_start import warm_command

BACKENDS = [pytest.param("local", marks=pytest.mark.local), pytest.param("docker", marks=pytest.mark.docker)]


def shell(folder: Path, *words: str, typed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_command(), "task", "shell", *words],
        input=typed,
        env=SECRET_FREE,
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("container", BACKENDS)
def test_shell_has_the_files_of_the_task(tmp_path: Path, container: str) -> None:
    done = shell(
        tmp_path,
        "write-greeting",
        "--tests",
        "--solution",
        f"container={container}",
        typed="pwd; ls /tests; ls /solution\n",
    )
    assert done.returncode == 0, done.stderr
    assert "/app" in done.stdout
    assert "test.sh" in done.stdout
    assert "solve.sh" in done.stdout
    assert not any(tmp_path.iterdir())


@pytest.mark.local
def test_shell_restores_the_files_of_a_step(cli: Cli, tmp_path: Path) -> None:
    made = cli("env.tasks=write-greeting", "tracker=none", "snapshot=every_step", "hydra.run.dir=first")
    assert made.returncode == 0, made.stderr
    before = shell(tmp_path, "--episode", "first/write-greeting@0", typed="cat greeting.txt\n")
    assert "No such file" in before.stdout, before.stderr
    after = shell(tmp_path, "--episode", "first/write-greeting@1", typed="wc -c greeting.txt\n")
    assert "No such file" not in after.stdout, after.stderr
    missing = shell(tmp_path, "--episode", "first/write-greeting@9", typed="")
    assert (missing.returncode, "its steps are 0 to 1" in missing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Expected one task, got none"),
        (("no-such-task",), "Expected `env.tasks` to match a task, got 'no-such-task'"),
        (("a", "b"), "Expected one task, got a, b"),
        (("a", "--episode", "first/x@0"), "Expected no task together with `--episode`, got a"),
        (("write-greeting", "env=twenty_questions"), "have no container. Use env=harbor"),
        (("--episode", "first/x@0"), "There is no run"),
    ],
)
def test_shell_rejects_wrong_arguments(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = shell(tmp_path, *words, typed="")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def at_a_terminal(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Starts the command in a separate terminal; yields it and the side that types."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ares_exp", "task", "shell", *words]
    started = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=SECRET_FREE, cwd=folder, start_new_session=True
    )
    os.close(theirs)
    try:
        yield started, ours
    finally:
        started.kill()
        started.wait()
        os.close(ours)


def runs(command: str) -> bool:
    return any(command in one[3] for one in processes())


def until(ours: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        try:
            seen += os.read(ours, 4096)
        except OSError:
            pytest.fail(f"the command has ended: {seen!r}")
    return seen


@pytest.mark.local
def test_ctrl_c_reaches_only_the_task_shell(tmp_path: Path) -> None:
    with at_a_terminal(tmp_path, "write-greeting") as (started, ours):
        until(ours, b"/app")
        os.write(ours, b"sleep 87654\r")
        assert wait_until(lambda: runs("sleep 87654"))
        os.write(ours, b"\x03")
        assert wait_until(lambda: not runs("sleep 87654"))  # earlier input is dropped with it
        os.write(ours, b"echo go$((40 + 2))\r")
        until(ours, b"go42")
        os.write(ours, b"exit\r")
        with suppress(OSError):
            while os.read(ours, 4096):
                pass
        assert started.wait(60) == 0


@pytest.mark.local
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_signal_removes_the_container(tmp_path: Path, number: signal.Signals) -> None:
    with at_a_terminal(tmp_path, "write-greeting") as (started, ours):
        until(ours, b"/app")
        os.write(ours, b"sleep 98765\r")
        until(ours, b"sleep 98765")
        assert wait_until(lambda: runs("sleep 98765"))
        started.send_signal(number)
        assert started.wait(60) == 130
        assert wait_until(lambda: not runs("sleep 98765"))
