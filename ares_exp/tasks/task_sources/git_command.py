"""The installed `git`, run with a bound on everything, and with nothing in it that a repository could start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ares_exp.containers.parent_death_guard import while_we_live
from ares_exp.errors import GitError, PreflightError
from ares_exp.tasks.task_sources.git_names import GIT_PROTOCOLS

MAX_OUTPUT_BYTES = 256 * 2**20
_MAX_ERROR_BYTES = 4096

# What a user has set up for all repositories holds here, too: credentials, proxies, keys. What points git at another
# repository (as in a hook), or makes it talk, does not.
_PASSED_ON = ("GIT_ASKPASS", "GIT_CONFIG", "GIT_PROXY", "GIT_SSH", "GIT_SSL")
_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "GIT_ALLOW_PROTOCOL": ":".join(GIT_PROTOCOLS),  # not ext:: and fd::, which start programs
    "LC_ALL": "C",
}
_SETTINGS = (
    *("core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"),
    *("submodule.recurse=false", "fetch.recurseSubmodules=false", "advice.detachedHead=false"),
    *("core.autocrlf=false", "core.eol=lf"),  # the same files on every machine
)


class Git:
    """Runs git commands, one after the other.

    Their process group is killed when they take too long, when `stop` is called and when this process dies.
    """

    def __init__(self, *, timeout_sec: float) -> None:
        """Prepares for commands.

        Args:
            timeout_sec: What one command may take.
        """
        self._timeout_sec = timeout_sec
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def run(
        self,
        *arguments: str,
        git_dir: Path | None = None,
        work_tree: Path | None = None,
        settings: Sequence[str] = (),
        at_most_sec: float | None = None,
    ) -> bytes:
        """Runs a command and returns its output. Blocking.

        Args:
            arguments: The command; whatever is not ours in it was checked, or comes after `--`.
            git_dir: The repository.
            work_tree: Where it checks files out.
            settings: More of them, `name=value`.
            at_most_sec: What it may take, if that is less than what any may.

        Raises:
            PreflightError: There is no git; it failed (`GitError`), took too long, printed too much, or was stopped.
        """
        program = shutil.which("git")
        if program is None:
            raise PreflightError(
                "Expected the program `git` on PATH, found none: tasks in git repositories need it. Install git, or "
                "play a local folder with `env.path=<folder>`."
            )
        timeout_sec = min(self._timeout_sec, at_most_sec or self._timeout_sec)
        places = [f"--git-dir={git_dir}"] if git_dir is not None else []
        places += [f"--work-tree={work_tree}"] if work_tree is not None else []
        options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
        with tempfile.TemporaryFile() as errors:
            process = self._start([program, *places, *options, *arguments], errors)
            late = threading.Event()
            timer = threading.Timer(timeout_sec, self._kill, [process, late])
            timer.start()
            try:
                assert process.stdout is not None
                output: bytes = process.stdout.read(MAX_OUTPUT_BYTES + 1)
                if len(output) > MAX_OUTPUT_BYTES:
                    self._kill(process)
                code = process.wait()
            finally:
                timer.cancel()
                self._end(process)
            said = _last_lines(errors)
        what = f"git {arguments[0]}"
        if self._stopped:
            raise PreflightError(f"`{what}` was stopped.")
        if late.is_set():
            raise PreflightError(
                f"`{what}` was killed after {timeout_sec:g} seconds. Is the repository reachable? More time: "
                f"`env.git_timeout_sec=…`. {said}".rstrip()
            )
        if len(output) > MAX_OUTPUT_BYTES:
            raise PreflightError(f"Expected `{what}` to print at most {MAX_OUTPUT_BYTES:,} bytes, got more.")
        if code != 0:
            raise GitError(f"`{what}` failed with exit code {code}: {said.rstrip('.') or 'it said nothing'}.")
        return output

    def stop(self) -> None:
        """Kills what runs and lets nothing start any more. For another thread."""
        with self._lock:
            self._stopped = True
            running = self._running
        if running is not None:
            self._kill(running)

    def _start(self, command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise PreflightError("Fetching tasks was stopped.")
            self._running = subprocess.Popen(
                while_we_live(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,  # also: without a terminal that somebody could be asked on
            )
            return self._running

    def _kill(self, process: subprocess.Popen[bytes], why: threading.Event | None = None) -> None:
        """Kills the whole group, once: as long as its stdin is open, its number is not another one's."""
        assert process.stdin is not None
        with self._lock:
            if not process.stdin.closed:
                if why is not None:
                    why.set()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.stdin.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._kill(process)
        process.wait()
        process.stdout.close()
        with self._lock:
            self._running = None


def _environment() -> dict[str, str]:
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_PASSED_ON)
    }
    return ours | _ENVIRONMENT


def _last_lines(errors: IO[bytes]) -> str:
    """The end of what git said, in one line."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _MAX_ERROR_BYTES))
    lines = errors.read().decode("utf-8", "replace").splitlines()
    told = [line.strip() for line in lines if line.strip() and not line.startswith("warning: filtering not recognized")]
    return " ".join(told[-4:])
