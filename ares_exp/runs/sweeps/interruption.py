"""Early end of a sweep, wherever its jobs run: a stop file in its folder, which its jobs watch.

A launcher may have started the jobs in other processes (joblib, submitit). They leave the terminal's process group, so
that Ctrl-C reaches the first process alone. That one leaves a file in the sweep's folder, which every job looks for; a
job also looks whether the first process still lives, which kill -9 gives no time for leaving a file. Either way a job
ends as if it had got SIGTERM: its running episodes are cancelled and recorded.
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
    """This process, which a launcher has started for jobs of a sweep: it ends with the sweep's first process."""

    def __init__(self, first_process: Mapping[str, str]) -> None:
        """Starts to watch the first process.

        Args:
            first_process: What `owner_labels` says there. If that is on another machine, which the jobs of a cluster
                may outlive, only the file ends them.
        """
        self._first_process = first_process
        self._lock = threading.Lock()
        self._sweep_dir: Path | None = None
        self._before: object = None
        threading.Thread(target=self._watch, name="sweep-watch", daemon=True).start()

    @contextmanager
    def running(self, sweep_dir: Path) -> Iterator[None]:
        """Lets the run job end in good order when the sweep is to end.

        Raises:
            SweepInterrupted: It ends already.
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
                    told = True  # once, and to the job's own handler: a second SIGTERM would end it in the middle
                    os.kill(os.getpid(), signal.SIGTERM)

    def _is_over(self, sweep_dir: Path) -> bool:
        return (sweep_dir / STOP).exists() or is_dead(self._first_process)


class Interruption:
    """The first process's handler of Ctrl-C (or SIGTERM) while its jobs run in others. A second signal exits at once.

    Attributes:
        requested: Whether the sweep is to end.
    """

    def __init__(self, sweep_dir: Path) -> None:
        self.requested = False
        self._sweep_dir = sweep_dir
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN or number is signal.SIGINT:
                signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Gives the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        if self.requested:
            os._exit(INTERRUPTED)  # the jobs notice that this process is gone
        self.requested = True
        with suppress(OSError):
            (self._sweep_dir / STOP).touch()
        with suppress(OSError, ValueError):
            sys.stderr.write("\ninterrupted: ending running episodes; once more leaves at once\n")
            sys.stderr.flush()
