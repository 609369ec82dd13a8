"""A run at a terminal: signals that end it or ask for snapshots, and warnings on standard error."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ares_exp.records.repeated_warnings import RepeatedWarnings
from ares_exp.records.secrets import SecretFilter, typed_secrets
from ares_exp.runs.run import Run

if TYPE_CHECKING:
    from ares_exp.records.run_summary import RunSummary


def prepare_log() -> None:
    """Masks typed secrets in what Hydra's handlers write, and shows warnings of one kind once."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(SecretFilter(typed_secrets(sys.argv[1:])))
        if type(handler) is logging.StreamHandler:
            handler.addFilter(RepeatedWarnings())
    logging.raiseExceptions = False  # a full disk is reported once, not as a traceback for each line


async def play_attended(run: Run) -> RunSummary:
    """Plays a run. The first Ctrl-C (or SIGTERM) ends it, the second leaves at once.

    Raises:
        UserError: Something is wrong; no container was started.
        KeyboardInterrupt: Ctrl-C before the first episode.
    """
    _take_signals(run)
    return await run.play()


def _take_signals(run: Run) -> None:
    presses = 0

    def on_signal() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            os._exit(130)  # containers hold on to this process: they go with it
        run.interrupt()
        with suppress(OSError, ValueError):  # nobody may be reading any more
            sys.stderr.write("\ninterrupted: ending running episodes; once more leaves at once\n")
            sys.stderr.flush()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # What is ignored (nohup) stays without effect, but by a handler: containers would inherit the ignoring.
        ignored = number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN
        if ignored:
            loop.add_signal_handler(number, lambda: None)
        elif number is not signal.SIGQUIT:
            loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGUSR1, run.request_snapshots)
