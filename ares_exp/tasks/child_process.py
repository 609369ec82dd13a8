"""Child processes with limits on their time and output. They are killed if this process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.parent_death_guard import while_we_live

MAX_OUTPUT_BYTES = 256 * 2**20
_MAX_ERROR_BYTES = 4096


class ChildFailedError(Exception):
    """A program failed. The message lacks a subject (such as "was stopped"), which callers put in front of it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a program: its exit code, its complete stdout, and the last lines of its stderr."""

    exit_code: int
    output: bytes
    errors: list[str]


class ChildProcess:
    """Runs programs one after the other, until another thread calls `stop`, which sets the event `stopped`."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._running: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, command: Sequence[str], *, env: Mapping[str, str], timeout_sec: float) -> Ended:
        """Runs a program to its end, with an empty stdin. Blocking.

        The program has only the environment variables in `env`. After `timeout_sec`, its process group is killed.

        Raises:
            ChildFailedError: The program was stopped, took too long, or printed too much.
        """
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self.stopped.is_set():
                    raise ChildFailedError("was stopped")
                process = self._running = subprocess.Popen(
                    while_we_live(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=env,
                    start_new_session=True,  # without a terminal, the program cannot prompt the user
                )
            late = threading.Event()
            timer = threading.Timer(timeout_sec, self._kill, [process, late])
            timer.start()
            assert process.stdout is not None
            try:
                output: bytes = process.stdout.read(MAX_OUTPUT_BYTES + 1)
                if len(output) > MAX_OUTPUT_BYTES:
                    self._kill(process)
                exit_code = process.wait()
            finally:
                timer.cancel()
                self._kill(process)
                process.wait()
                process.stdout.close()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
            lines = errors.read().decode("utf-8", "replace").splitlines()
        if self.stopped.is_set():
            raise ChildFailedError("was stopped")
        if late.is_set():
            raise ChildFailedError(f"was killed after {timeout_sec:g} seconds")
        if len(output) > MAX_OUTPUT_BYTES:
            raise ChildFailedError(f"printed more than {MAX_OUTPUT_BYTES:,} bytes")
        return Ended(exit_code, output, [line.strip() for line in lines if line.strip()])

    def run_python(
        self, program: Path, arguments: Sequence[str], *, env: Mapping[str, str], timeout_sec: float
    ) -> None:
        """Runs a Python file, which must not import ares_exp; see `run`. A nonzero exit code also raises an error."""
        ended = self.run([sys.executable, "-P", str(program), *arguments], env=env, timeout_sec=timeout_sec)
        if ended.exit_code != 0:
            raise ChildFailedError(f"failed: {ended.errors[-1] if ended.errors else f'exit code {ended.exit_code}'}")

    def stop(self) -> None:
        """Kills the running program, and prevents the start of other programs. To be called from another thread."""
        with self._lock:
            self.stopped.set()
            running = self._running
        if running is not None:
            self._kill(running)

    def _kill(self, process: subprocess.Popen[bytes], why: threading.Event | None = None) -> None:
        """Kills the program's process group and sets the event `why`. Does nothing if the group was killed before.

        A second kill could hit another process group with the same id. A closed `process.stdin` shows a kill.
        """
        assert process.stdin is not None
        with self._lock:
            if not process.stdin.closed:
                if why is not None:
                    why.set()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.stdin.close()
