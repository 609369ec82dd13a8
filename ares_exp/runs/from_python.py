"""The functions `run` and `arun`, which run an experiment from Python like the command `python -m ares_exp`."""

from __future__ import annotations

import asyncio
import contextvars
import html
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.errors import ConfigError, UserError
from ares_exp.records.results import EpisodeResult, Outcome, RunSummary
from ares_exp.runs.steady_loop import run_steadily

if TYPE_CHECKING:
    import pandas

    from ares_exp.runs.run import Run
    from ares_exp.trajectories.stored_episodes import StoredEpisodes


@dataclass(frozen=True)
class RunResults:
    """The results of a run. Printing this object shows the table that `ares-exp` prints at the end of a run.

    Attributes:
        run_dir: Run directory.
        summary: Totals of the run. `summary.results` contains the results of all episodes, including retried ones.
    """

    run_dir: Path
    summary: RunSummary

    @property
    def rows(self) -> tuple[EpisodeResult, ...]:
        """The result of each attempt (of its last episode if it was retried), sorted by task and attempt."""
        return tuple(sorted(self.summary.final, key=lambda row: (row.task_name, row.attempt)))

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the attempts that have a reward; `None` if there are no rewards."""
        return self.summary.mean_reward

    @property
    def complete(self) -> bool:
        """Whether every planned attempt has a reward and a row in `episodes.jsonl`."""
        return self.summary.complete

    @property
    def exit_code(self) -> int:
        """The exit code that `ares-exp` has for such a run; 0 if it is complete and no reference solution failed."""
        return self.summary.exit_code

    def to_frame(self, *, tries: bool = False) -> pandas.DataFrame:
        """Returns a data frame with one row per attempt. Missing rewards are NaN.

        The columns are the fields of `EpisodeResult`. Fields with several values have several columns: `rewards.<key>`,
        `phase_sec.<phase>`, `error_type`, `error_message`, `limit`.

        Args:
            tries: Whether to return one row per episode, in the order in which the episodes ended, instead of one row
                per attempt. An attempt has several episodes if it was retried.

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
        """Returns the recorded episodes of the run. Each episode's steps are loaded when they are accessed.

        Raises:
            TrajectoryFormatError: The run has no readable trajectories (for example, with `collector=none`).
        """
        from ares_exp.trajectories.stored_episodes import load

        return load(self.run_dir)

    def __repr__(self) -> str:
        place, reward = str(self.run_dir), self.mean_reward
        return f"RunResults(run_dir={place!r}, episodes={len(self.rows)}, mean_reward={reward})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        from ares_exp.reports.summary import render_summary

        text = StringIO()
        render_summary(self.summary, run_dir=self.run_dir, stream=text)
        return text.getvalue().rstrip("\n")


_NO_ROW = EpisodeResult("", "", 0, 0, Outcome.CANCELLED, None)
"""An empty result that defines the columns of a data frame if the run has no episodes."""


INTERRUPT_LIMIT_SEC = 60.0
"""Maximum time, in seconds, that the caller waits for an interrupted run to release its resources."""

SIGNAL_CHECK_SEC = 0.5
"""Interval, in seconds, at which the waiting caller wakes up to notice a Ctrl-C.

A Ctrl-C does not end the wait by itself if another thread received the signal, or if the signal arrived just before the
wait.
"""

_in_progress = threading.Lock()


def run(overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), quiet: bool = False) -> RunResults:
    """Runs an experiment like `python -m ares_exp` with these overrides, and returns its results.

    The run has the same directory, records, checks, retries and budgets as a run that the command starts. The command
    can resume a run that this function started, and this function can resume a run of the command
    (`resume=outputs/first`). The run uses its own event loop in a separate thread, and the caller waits for it. You can
    call this function in scripts, threads and notebooks. In a notebook, it blocks the notebook's event loop. To await a
    run instead, use `arun`.

    If an attempt fails, the failure is recorded as a row, and no exception is raised. `results.exit_code` is the exit
    code that the command would have. Ctrl-C cancels running episodes, closes the run (which can be resumed), and raises
    `KeyboardInterrupt`. Other signals are still handled by your script.

    Args:
        overrides: Overrides as on the command line, such as `["env=harbor", "env.path=tasks", "policy=oracle"]`.
        config_dirs: Folders of options, as for `--config-dir`.
        quiet: Whether to omit the progress and the summary. Warnings go to the logging handlers of the script or, if
            there are no handlers, to standard error.

    Raises:
        UserError: The overrides are invalid, or a part of the run cannot be used. No container was started.
        ConfigError: The overrides have a flag, such as `-m` (in Python, a sweep is a loop over runs), or another run of
            this process is running.
        KeyboardInterrupt: Ctrl-C was pressed. The episodes have ended, and the rows of finished episodes are kept.
    """
    running = _Running(overrides, config_dirs, quiet=quiet)
    try:
        while not running.results.done():
            wait([running.results], timeout=SIGNAL_CHECK_SEC)
        return running.results.result()
    except KeyboardInterrupt:
        running.interrupt()
        with suppress(Exception):
            running.results.exception(INTERRUPT_LIMIT_SEC)
        raise


async def arun(
    overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), quiet: bool = False
) -> RunResults:
    """Runs an experiment like `run`, without blocking the event loop of the caller.

    If the awaiting task is cancelled, running episodes are cancelled and the run is closed. It can be resumed. The
    arguments and errors are the same as for `run`.
    """
    running = _Running(overrides, config_dirs, quiet=quiet)
    results = asyncio.wrap_future(running.results)
    try:
        return await asyncio.shield(results)
    except asyncio.CancelledError:
        running.interrupt()
        await asyncio.wait({results}, timeout=INTERRUPT_LIMIT_SEC)
        if results.done():
            results.exception()  # retrieves the exception of the interrupted run
        raise


class _Running:
    """A run in its own thread, which starts immediately. `results` is a future of the run's results."""

    def __init__(self, overrides: Sequence[str], config_dirs: Sequence[str | Path], *, quiet: bool) -> None:
        self.results: Future[RunResults] = Future()
        self._overrides = checked_overrides(overrides)
        self._config_dirs = [Path(folder) for folder in config_dirs]
        self._quiet = quiet
        self._started: tuple[asyncio.AbstractEventLoop, Run] | None = None
        self._interrupted = False
        _claim()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._execute,), name="ares_exp run", daemon=True).start()

    def interrupt(self) -> None:
        """Ends the run early. Can be called from any thread, at any time."""
        self._interrupted = True
        if self._started is not None:
            loop, run = self._started
            with suppress(RuntimeError):  # the run has ended meanwhile
                loop.call_soon_threadsafe(run.interrupt)

    def _execute(self) -> None:
        try:
            results = run_steadily(self._execute_run())
        except BaseException as error:
            if isinstance(error, UserError):  # only the message is useful; a traceback of this thread would hide it
                error = error.with_traceback(None)
            _in_progress.release()
            self.results.set_exception(error)
        else:
            _in_progress.release()
            self.results.set_result(results)

    async def _execute_run(self) -> RunResults:
        from ares_exp.runs.composing import compose_run, run_log

        run = compose_run(self._overrides, self._config_dirs, quiet=self._quiet)
        self._started = asyncio.get_running_loop(), run
        try:
            with run_log(run.log_config, self._overrides):
                if self._interrupted:
                    run.interrupt()
                summary = await run.execute()
        except UserError:
            run.run_dir.discard()
            raise
        return RunResults(run.run_dir.path, summary)


@contextmanager
def only_run() -> Iterator[None]:
    """Marks this process as busy with a run during the block. Raises `ConfigError` if another run is in progress."""
    _claim()
    try:
        yield
    finally:
        _in_progress.release()


def _claim() -> None:
    if not _in_progress.acquire(blocking=False):
        raise ConfigError(
            "A process supports one run at a time, and another run is in progress. Wait until it has ended, or use a "
            "sweep to run several at once: `python -m ares_exp -m hydra/launcher=joblib …`."
        )


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Checks and returns the overrides. Raises `ConfigError` if they are not a list of `key=value` strings."""
    if isinstance(overrides, str) or not all(isinstance(one, str) for one in overrides):
        raise ConfigError(
            f"Expected a list of overrides, got {overrides!r:.200}. Write each as on the command line: "
            '`run(["env=harbor", "policy=oracle"])`.'
        )
    for one in overrides:
        if one in ("-m", "--multirun"):
            raise ConfigError(
                "Sweeps (`-m`) only work on the command line. In Python, loop over runs: "
                '`[ares_exp.run([f"seed={seed}"]) for seed in range(3)]`.'
            )
        if one.startswith("-") or not (one.startswith("~") or "=" in one):
            raise ConfigError(
                f"Expected overrides (`key=value`), got `{one:.200}`. Pass folders of options with `config_dirs=[…]`. "
                "Flags and other commands only work on the command line: `python -m ares_exp --help`."
            )
    return list(overrides)
