"""The early end of a sweep, which is signalled to all its jobs by a stop file in the sweep's folder.

A launcher (joblib, submitit) can run the jobs in other processes, which Ctrl-C does not reach. The first process, which
the user started, then creates the stop file. A job ends if this file exists, or if the first process was killed (for
example, with `kill -9`). It then ends as after SIGTERM: its running episodes are cancelled and recorded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ares_exp.containers.ownership import is_dead
from ares_exp.errors import SweepInterrupted
from ares_exp.records.exit_codes import INTERRUPTED
from ares_exp.records.run_dir import STOP

POLL_SEC = 0.3

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobProcess:
    """A process in which a launcher runs jobs of a sweep.

    It ends the running job if the sweep is stopped, and itself if the sweep's first process has ended.
    """

    def __init__(self, first_process: Mapping[str, str]) -> None:
        """Starts a thread that checks the stop file and the first process.

        `first_process` identifies the first process by its `owner_labels`. If that process runs on another machine, the
        thread cannot check it, so only the stop file ends the jobs.
        """
        self._first_process = first_process
        self._lock = threading.Lock()
        self._sweep_dir: Path | None = None
        self._before: object = None
        threading.Thread(target=self._watch, name="sweep-watch", daemon=True).start()

    @contextmanager
    def running(self, sweep_dir: Path) -> Iterator[None]:
        """Sends SIGTERM to this process if the sweep ends while the block, which runs a job, is executed.

        Raises:
            SweepInterrupted: The sweep has already been stopped.
        """
        if self._is_over(sweep_dir):
            raise SweepInterrupted
        with self._lock:
            self._sweep_dir, self._before = sweep_dir, signal.getsignal(signal.SIGTERM)
        try:
            yield
        finally:
            with self._lock:
                self._sweep_dir = None

    def _watch(self) -> None:
        told = False
        while True:
            time.sleep(POLL_SEC)
            with self._lock:
                if self._sweep_dir is None:
                    told = False
                    if is_dead(self._first_process):  # the launcher would keep this process for more jobs
                        os._exit(INTERRUPTED)
                elif (
                    not told and self._is_over(self._sweep_dir) and signal.getsignal(signal.SIGTERM) is not self._before
                ):
                    told = True  # only once, because a second SIGTERM would kill the job
                    os.kill(os.getpid(), signal.SIGTERM)

    def _is_over(self, sweep_dir: Path) -> bool:
        return (sweep_dir / STOP).exists() or is_dead(self._first_process)


class Interruption:
    """Handles Ctrl-C and SIGTERM in the first process while other processes run the jobs.

    The first signal creates the stop file. A second signal ends the first process immediately.
    """

    def __init__(self, sweep_dir: Path) -> None:
        self.requested = False
        self._sweep_dir = sweep_dir
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN or number is signal.SIGINT:
                signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        if self.requested:
            os._exit(INTERRUPTED)  # the jobs detect the end of this process
        self.requested = True
        with suppress(OSError):
            (self._sweep_dir / STOP).touch()
        with suppress(OSError, ValueError):
            sys.stderr.write("\ninterrupted: running episodes are ending. Press Ctrl-C again to exit immediately\n")
            sys.stderr.flush()
