"""`run` and `arun`: a run as the command runs it, from a script or a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import html
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.errors import ConfigError, UserError
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_summary import RunSummary
from ares_exp.runs.steady_loop import run_steadily

if TYPE_CHECKING:
    import pandas

    from ares_exp.runs.run import Run
    from ares_exp.trajectories.stored_episodes import StoredEpisodes


@dataclass(frozen=True)
class RunResults:
    """What a run adds up to. Printing it shows the table that the command prints.

    Attributes:
        run_dir: The run directory.
        summary: Totals, and every try of every attempt (`summary.results`).
    """

    run_dir: Path
    summary: RunSummary

    @property
    def rows(self) -> tuple[EpisodeResult, ...]:
        """The result of every attempt (the last try of each), by task and attempt."""
        return tuple(sorted(self.summary.final, key=lambda row: (row.task_name, row.attempt)))

    @property
    def mean_reward(self) -> float | None:
        """Mean over the attempts that have a reward; `None` when there are none."""
        return self.summary.mean_reward

    @property
    def complete(self) -> bool:
        """Whether every attempt that was asked for has a reward, and a row on disk."""
        return self.summary.complete

    @property
    def exit_code(self) -> int:
        """Exit code of the command for such a run: 0 when it is complete and nothing in it is broken."""
        return self.summary.exit_code

    def to_frame(self, *, tries: bool = False) -> pandas.DataFrame:
        """Returns a data frame with a row for each attempt; a reward that is missing is NaN.

        Columns are the fields of `EpisodeResult`; those with fields of their own become one column for each:
        `rewards.<key>`, `phase_sec.<phase>`, `error_type`, `error_message`, `limit`.

        Args:
            tries: Whether there is a row for every try, in the order in which they finished, instead of the last one.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError(
                "A data frame needs the package pandas: `pip install 'ares-exp[pandas]'`. Without it, `results.rows` "
                "has the same values."
            ) from None
        rows = [row.to_row() for row in (self.summary.results if tries else self.rows)]
        columns = dict.fromkeys(name for row in [_NO_ROW.to_row(), *rows] for name in row)
        return pandas.DataFrame(rows, columns=list(columns)).astype({"reward": "float64"})

    def trajectories(self) -> StoredEpisodes:
        """Returns the recorded episodes of the run, their steps left on disk.

        Raises:
            TrajectoryFormatError: Nothing was recorded that can be read (`collector=none`).
        """
        from ares_exp.trajectories.stored_episodes import load

        return load(self.run_dir)

    def __repr__(self) -> str:
        place, reward = str(self.run_dir), self.mean_reward
        return f"RunResults(run_dir={place!r}, episodes={len(self.rows)}, mean_reward={reward})"

    def _repr_html_(self) -> str:
        """Shows the table in a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        from ares_exp.reports.summary import render_summary

        text = StringIO()
        render_summary(self.summary, run_dir=self.run_dir, stream=text)
        return text.getvalue().rstrip("\n")


_NO_ROW = EpisodeResult("", "", 0, 0, Outcome.CANCELLED, None)
"""A row without mappings: the columns that every data frame has."""


INTERRUPT_LIMIT_SEC = 60.0
"""Seconds that an interrupted run has to release everything before its caller goes on without it."""

_in_progress = threading.Lock()


def run(overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), quiet: bool = False) -> RunResults:
    """Runs a run as `python -m ares_exp` does with these overrides, and returns its results.

    The run has the same directory, records, checks, retries and budgets as that of the command, and either can resume
    the other's (`resume=outputs/first`). It is run on an event loop in a thread of its own while the caller waits:
    in scripts, in threads, and in notebooks, whose loop is then blocked. To await it, use `arun`.

    An attempt that fails is a row, not an exception: `results.exit_code` is what the command would exit with. Ctrl-C
    ends running episodes, closes the run, which can be resumed, and raises `KeyboardInterrupt`; other signals keep the
    handlers of the script.

    Args:
        overrides: As on the command line: `["env=harbor", "env.path=tasks", "policy=oracle"]`.
        config_dirs: Folders of options, as `--config-dir`.
        quiet: Whether neither progress nor the summary is printed. Warnings go to the logging of the script; where it
            has none, to standard error.

    Raises:
        UserError: Something is wrong with the overrides or with what they name; no container was started.
        ConfigError: Likewise: a flag, such as `-m` (a sweep is a loop over runs in Python); or another run of this
            process is running.
        KeyboardInterrupt: Ctrl-C. Its episodes have ended, and the rows of those that had a result are kept.
    """
    running = _Running(overrides, config_dirs, quiet=quiet)
    try:
        return running.results.result()
    except KeyboardInterrupt:
        running.interrupt()
        with suppress(Exception):
            running.results.exception(INTERRUPT_LIMIT_SEC)
        raise


async def arun(
    overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), quiet: bool = False
) -> RunResults:
    """Runs a run like `run`, without blocking the event loop of the caller.

    Cancelling the awaiting task ends running episodes and closes the run, which can be resumed.

    Args:
        overrides: As for `run`.
        config_dirs: As for `run`.
        quiet: As for `run`.

    Raises:
        UserError: As `run`.
    """
    running = _Running(overrides, config_dirs, quiet=quiet)
    results = asyncio.wrap_future(running.results)
    try:
        return await asyncio.shield(results)
    except asyncio.CancelledError:
        running.interrupt()
        await asyncio.wait({results}, timeout=INTERRUPT_LIMIT_SEC)
        if results.done():
            results.exception()  # it is interrupted, which is no news
        raise


class _Running:
    """A run that a thread runs.

    Attributes:
        results: Its results, or what it raised.
    """

    def __init__(self, overrides: Sequence[str], config_dirs: Sequence[str | Path], *, quiet: bool) -> None:
        """Starts the thread. Raises `ConfigError` when another run of this process is running."""
        self.results: Future[RunResults] = Future()
        self._overrides = checked_overrides(overrides)
        self._config_dirs = [Path(folder) for folder in config_dirs]
        self._quiet = quiet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run: Run | None = None
        self._interrupted = False
        _claim()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._execute,), name="ares_exp run", daemon=True).start()

    def interrupt(self) -> None:
        """Ends the run early. May be called from any thread, at any time."""
        self._interrupted = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._interrupt_run)

    def _interrupt_run(self) -> None:
        if self._run is not None:
            self._run.interrupt()

    def _execute(self) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(self.results.set_result, run_steadily(self._execute_run()))
        except UserError as error:  # the message is enough: frames of this thread would hide it
            settle = partial(self.results.set_exception, error.with_traceback(None))
        except BaseException as error:
            settle = partial(self.results.set_exception, error)
        _in_progress.release()
        settle()

    async def _execute_run(self) -> RunResults:
        from ares_exp.runs.composing import compose_job, run_log

        self._loop = asyncio.get_running_loop()
        job = compose_job(self._overrides, self._config_dirs, quiet=self._quiet)
        self._run = run = job.run
        try:
            with run_log(job.logging, self._overrides):
                if self._interrupted:
                    run.interrupt()
                summary = await run.execute()
        except UserError:
            run.run_dir.discard()
            raise
        return RunResults(run.run_dir.path, summary)


@contextmanager
def only_run() -> Iterator[None]:
    """Claims this process for a run inside the block. Raises `ConfigError` when another one is running."""
    _claim()
    try:
        yield
    finally:
        _in_progress.release()


def _claim() -> None:
    if not _in_progress.acquire(blocking=False):
        raise ConfigError(
            "Expected one run at a time in a process, and another one is running: wait for it first, or run "
            "several at once as a sweep, `python -m ares_exp -m hydra/launcher=joblib …`."
        )


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides.

    Raises:
        ConfigError: They are no list of strings, or there is a flag among them.
    """
    if isinstance(overrides, str) or not all(isinstance(one, str) for one in overrides):
        raise ConfigError(
            f"Expected a list of overrides, got {overrides!r:.200}. Write each as on the command line: "
            '`run(["env=harbor", "policy=oracle"])`.'
        )
    for one in overrides:
        if one in ("-m", "--multirun"):
            raise ConfigError(
                "A sweep (`-m`) is run by the command. In Python, loop over runs: "
                '`[ares_exp.run([f"seed={seed}"]) for seed in range(3)]`.'
            )
        if one.startswith("-") or not (one.startswith("~") or "=" in one):
            raise ConfigError(
                f"Expected overrides (`key=value`), got `{one:.200}`. Folders of options are `config_dirs=[…]`; flags "
                "and other commands belong to the command line, `python -m ares_exp --help`."
            )
    return list(overrides)
