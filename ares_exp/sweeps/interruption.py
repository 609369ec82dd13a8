"""How a sweep ends early, wherever its jobs run: the process that began it is asked to, and its jobs notice.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ares_exp.containers.ownership import is_dead
from ares_exp.exit_codes import INTERRUPTED

POLL_SEC = 0.3
STOP = "stop"
"""Name of the file in a sweep's folder that asks its jobs to end. `touch` does it, too."""

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SweepInterrupted(Exception):
    """The sweep ends early: this job was cut short, or not begun. A BaseException would break a launcher's worker."""


@contextmanager
def ends_with_the_sweep(sweep_dir: Path, first_process: Mapping[str, str]) -> Iterator[None]:
    """Has a job in a process of its own end when the sweep is to, or when its first process is gone.

    Args:
        sweep_dir: The sweep's folder.
        first_process: What `owner_labels` says in the sweep's first process. If that is on another machine, which a
            cluster's jobs outlive, the file alone counts.

    Raises:
        SweepInterrupted: It ends already.
    """

    def is_over() -> bool:
        return (sweep_dir / STOP).exists() or is_dead(first_process)

    if is_over():
        raise SweepInterrupted
    before, ended = signal.getsignal(signal.SIGTERM), threading.Event()

    def watch() -> None:
        # Only when the job has its own handler: the first SIGTERM ends it in good order, a second one would at once.
        while not ended.wait(POLL_SEC):
            if signal.getsignal(signal.SIGTERM) is not before and is_over():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watching = threading.Thread(target=watch, name="sweep-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


class Interruption:
    """What the first process does on Ctrl-C (or SIGTERM) while its jobs run in others. Once more leaves at once.

    Attributes:
        requested: Whether the sweep is to end.
    """

    def __init__(self, sweep_dir: Path) -> None:
        """Begins: the handlers are installed.

        Args:
            sweep_dir: The sweep's folder, which is there.
        """
        self.requested = False
        self._stop = sweep_dir / STOP
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
            self._stop.touch()
        with suppress(OSError, ValueError):
            sys.stderr.write("\ninterrupted: ending running episodes; once more leaves at once\n")
            sys.stderr.flush()
