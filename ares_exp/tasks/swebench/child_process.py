"""A Python program in another process: for code that is slow to import, reads `.env` files, or may never end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# It holds our end of its stdin for as long as we live: it ends with us, also by kill -9.
_WHILE_WE_LIVE = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_MAX_ERROR_BYTES = 4096


class ChildFailedError(Exception):
    """The program did not do its work; the message is the end of what it said, in one line."""


class ChildProcess:
    """One run of a Python file by the interpreter that runs us; the file imports nothing of this package."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, program: Path, arguments: Sequence[str], *, env: dict[str, str], timeout_sec: float) -> None:
        """Runs it to its end.

        Args:
            program: The file.
            arguments: Its arguments.
            env: All its variables.
            timeout_sec: When it is killed.

        Raises:
            ChildFailedError: It failed, took too long, or was stopped.
        """
        command = [sys.executable, "-P", "-c", _WHILE_WE_LIVE, str(program), *arguments]
        with tempfile.TemporaryFile() as said:
            with self._lock:
                if self._stopped:
                    raise ChildFailedError("It was stopped.")
                process = self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=env, start_new_session=True
                )
            try:
                code: int | None = process.wait(timeout_sec)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._kill()
            said.seek(max(0, said.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
            lines = said.read().decode("utf-8", "replace").split("\n")
        if self._stopped:
            raise ChildFailedError("It was stopped.")
        if code is None:
            raise ChildFailedError(f"It was killed after {timeout_sec:g} s.")
        if code != 0:
            raise ChildFailedError(next((line for line in reversed(lines) if line.strip()), f"Exit code {code}."))

    def stop(self) -> None:
        """Kills it, and lets none start any more. For another thread."""
        with self._lock:
            self._stopped = True
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait()
