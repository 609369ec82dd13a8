"""A run of 16 episodes as a user starts it, ended in the middle in every way; and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

BOXES = 16
IN_MEMORY = Path("/dev/shm")
ENDED_WITHIN_SEC = 60.0
"""For a machine many times slower than the one on which it takes a second or two."""

STARTED_WITHIN_SEC = 150.0

Phase = str
"""`create`: some boxes are there, not all. `exec`: a command runs in each. `teardown`: Ctrl-C has ended some."""

CASES: list[tuple[Phase, signal.Signals]] = [
    ("create", signal.SIGTERM),
    ("exec", signal.SIGKILL),
    ("teardown", signal.SIGINT),
]

TASK = """
schema_version = "1.4"
[task]
name = "test/sleep"
[environment]
docker_image = "debian:bookworm-slim"
network_mode = "no-network"
"""


class Run:
    """`python -m ares_exp` with 16 boxes at the same time, each with a command and a daemon that ignore signals."""

    def __init__(self, backend: str, directory: Path, boxes: Callable[[Run], int], busy: Callable[[Run], int]) -> None:
        """Starts it.

        Args:
            backend: `docker` or `local`.
            directory: An empty one. All temporary files go to `directory / "tmp"`.
            boxes: Counts the boxes of a run.
            busy: Counts those in which its command runs.
        """
        self.mark = f"61.{uuid.uuid4().int % 10**12:012}"
        self.temporary = directory / "tmp"
        self._boxes, self._busy = boxes, busy
        self._seen: set[tuple[int, str]] = set()
        task = directory / "task"
        for folder in (self.temporary, task / "environment", task / "tests"):
            folder.mkdir(parents=True)
        (task / "task.toml").write_text(TASK)
        (task / "instruction.md").write_text("Sleep.")
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
        (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        self.env = {**os.environ, "TMPDIR": str(self.temporary)}
        words = [f"container={backend}", "env.path=task", f"attempts={BOXES}", f"concurrency={BOXES}", "tracker=none"]
        command = f'(setsid sleep {self.mark} >/dev/null 2>&1 &); trap "" HUP INT TERM; sleep {self.mark}; echo'
        reply = f"policy.replies=['```bash\n{command}\n```']"
        self._errors = directory / "errors"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ares_exp", *words, "policy=scripted", reply, "hydra.run.dir=run"],
                cwd=directory,
                env=self.env,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def reach(self, phase: Phase) -> None:
        if phase == "create":
            self._wait(lambda: self._boxes(self) >= BOXES // 4)
            assert self._busy(self) < BOXES, "all boxes were up at once"
            return
        self._wait(lambda: self._busy(self) == BOXES)
        self._note_processes()
        if phase == "teardown":
            self.process.send_signal(signal.SIGINT)
            self._wait(lambda: self._boxes(self) < BOXES)

    def end(self, number: signal.Signals) -> float:
        """Sends a signal and waits for the end of the process; returns when that was."""
        self._note_processes()
        self.process.send_signal(number)
        code = self.process.wait(ENDED_WITHIN_SEC)
        # A second Ctrl-C may reach an interpreter that is ending: for a shell this is 130, too.
        expected = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGINT: (130, -signal.SIGINT)}
        assert code in expected.get(number, (130,)), (code, self.errors())
        assert "Traceback" not in self.errors()
        return time.monotonic()

    def errors(self) -> str:
        return self._errors.read_text()

    def processes(self) -> list[str]:
        """Its processes that still live, in boxes and out of them."""
        now = {(pid, start): words for pid, _, start, words in processes()}
        marks = (self.mark, str(self.temporary), self._boxes_named)
        named = [words for words in now.values() if any(mark in words for mark in marks)]
        return [*named, *(now[one] for one in self._seen & now.keys())]

    def files(self) -> list[str]:
        return [path.name for path in (*self.temporary.iterdir(), *IN_MEMORY.glob(f"*{self._boxes_named}*"))]

    def box_directories(self) -> list[Path]:
        return [path for folder in (self.temporary, IN_MEMORY) for path in folder.glob(f"{self._boxes_named}*")]

    @property
    def _boxes_named(self) -> str:
        return f"ares_exp-box-{self.process.pid}-"

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert wait_until(lambda: condition() or self.process.poll() is not None, STARTED_WITHIN_SEC), self.errors()
        assert self.process.poll() is None, self.errors()

    def _note_processes(self) -> None:
        found, family = list(processes()), {self.process.pid}
        while more := {pid for pid, parent, _, _ in found if parent in family} - family:
            family |= more
        self._seen |= {(pid, start) for pid, _, start, _ in found if pid in family}


def processes() -> Iterator[tuple[int, int, str, str]]:
    """Number, parent, start and command line of all processes here; nothing where there is no `/proc`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if fields[0] not in "ZX":
                yield int(entry.name), int(fields[1]), fields[19], words


def wait_until(condition: Callable[[], object], seconds: float = ENDED_WITHIN_SEC) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs; not if it has ended and has not been reaped yet."""
    return any(number == pid for number, _, _, _ in processes())


async def until(condition: Callable[[], object]) -> None:
    """Waits for something that other processes or threads do."""
    async with asyncio.timeout(ENDED_WITHIN_SEC):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def own_directory(prefix: str) -> Path:
    """Makes a temporary directory with a short name; removes those of processes that were killed, with their mounts."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}-*-*"):
        owner = path.name.removeprefix(f"{prefix}-").partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):  # another process removes it, too
                remove_with_mounts(path)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-"))


def remove_with_mounts(directory: Path) -> None:
    mounts = Path("/proc/self/mountinfo")
    points = [line.split()[4] for line in mounts.read_text().splitlines()] if mounts.exists() else []
    for point in reversed([point for point in points if point.startswith(f"{directory}/")]):
        subprocess.run(["umount", "--lazy", point], check=False)
    shutil.rmtree(directory)


def clean(env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ares_exp", "clean"],
        env=env,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout
