"""The report on a sweep, with one row for each job, the best job, and results over repeated jobs."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

from ares_exp.errors import ConfigError, close_matches
from ares_exp.records import exit_codes
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.records.statistics.run_statistics import RunStatistics, json_ready
from ares_exp.records.terminal_text import (
    PIPE_COLUMNS,
    columns_that_fit,
    count_of,
    draw,
    format_number,
    make_table,
    one_line,
    shown_path,
    wrapped,
    write,
)
from ares_exp.runs.resume.session import RESUME_KEYS
from ares_exp.runs.sweeps.jobs import JobFolder, JobState, SweepPlan, job_folders, unescaped, varied
from ares_exp.trackers.metrics import PREFIX, metrics

SWEEP_JSON = "sweep.json"
SCHEMA_VERSION = 1
REPEATED_BY = "seed"
"""Default key by which jobs with otherwise equal overrides are combined to one setting."""


@dataclass(frozen=True, slots=True)
class Row:
    """One job in the report.

    Attributes:
        job: Path of the job's folder, relative to the sweep's folder.
        overrides: Overrides whose values differ between the sweep's jobs, by key, with masked secrets.
        state: State of the job.
        planned: Number of planned attempts.
        finished: Number of attempts that have ended. Attempts with the outcome `cancelled` or `lost` do not count.
        outcomes: Number of attempts by outcome.
        objective: Value of the metric by which the jobs are compared; `None` if it cannot be computed.
        low, high: Bounds of the metric's 95 % interval; `None` if there is no interval.
        mean_reward: Mean reward, with errors counted as zero.
        tokens, cost: Sums over all episodes, with the cost in US dollars.
        message: Reason why the job failed; `None` if it did not fail.
    """

    job: str
    overrides: Mapping[str, str]
    state: JobState
    planned: int = 0
    finished: int = 0
    outcomes: Mapping[str, int] | None = None
    objective: float | None = None
    low: float | None = None
    high: float | None = None
    mean_reward: float | None = None
    tokens: int = 0
    cost: float = 0.0
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """The combined results of jobs that differ only in one key, such as `seed`.

    Attributes:
        overrides: Overrides of all other keys that vary in the sweep, by key. They are the same for these jobs.
        jobs: Paths of the jobs' folders, relative to the sweep's folder.
        started: Number of these jobs whose run was started.
        planned, finished: Numbers of planned and finished attempts, summed over these jobs.
        objective: Metric over all results of these jobs; `None` if it cannot be computed.
        low, high: Bounds of the metric's interval over tasks and jobs; `None` if there is no interval.
        lowest, highest: Lowest and highest value of the metric of a single job; `None` if there is no value.
    """

    overrides: Mapping[str, str]
    jobs: tuple[str, ...]
    started: int
    planned: int
    finished: int
    objective: float | None
    low: float | None
    high: float | None
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The summary of a sweep's folder.

    Attributes:
        plan: List of the sweep's jobs.
        rows: One row per job, including jobs that have not started.
        exit_code: Exit code that the sweep's command has, unless it is interrupted.
        over: Key, such as `seed`, by which jobs with otherwise equal overrides are combined to one setting.
        settings: Combined results of jobs that differ only in the key `over`; empty if there are no such jobs.
    """

    path: Path
    plan: SweepPlan
    rows: tuple[Row, ...]
    exit_code: int
    over: str = REPEATED_BY
    settings: tuple[Setting, ...] = ()

    @classmethod
    def read(cls, path: Path, *, over: str | None = None) -> Self:
        """Reads the report on a sweep from its folder. The sweep can be running, have ended or have been killed.

        Jobs that differ only in the key `over` are combined to one setting. `None` uses `seed`, if there are such jobs.

        Raises:
            ConfigError: The folder is not a sweep, a record is broken, or no job overrides the key `over`.
        """
        plan = SweepPlan.read(path)
        folders = {str(folder.relative_to(path)): JobFolder.read(folder) for folder in job_folders(path)}
        if not folders and not plan.count:
            raise ConfigError(f"{path} is not the folder of a sweep: it contains no jobs and no plan.")
        missing = [name for name in map(str, range(plan.count)) if name not in folders][: plan.count - len(folders)]
        names = sorted([*folders, *missing], key=lambda name: (int(name) if name.isdecimal() else 0, name))
        planned = {str(number): job for number, job in enumerate(plan.jobs)}
        jobs = [folders.get(name, JobFolder(path / name)) for name in names]
        overrides = {
            name: planned[name] if name in planned else job.overrides() for name, job in zip(names, jobs, strict=True)
        }
        keys = varied([given for given in overrides.values() if given])
        rows = tuple(
            _row(name, job, _chosen(overrides[name], keys), plan.objective)
            for name, job in zip(names, jobs, strict=True)
        )
        if over is not None:
            found = dict.fromkeys(override.partition("=")[0] for job in overrides.values() for override in job)
            if over not in (known := [name for name in found if name not in RESUME_KEYS]):
                raise ConfigError(
                    f"No job of {_shown(path)} overrides `{over}`.{close_matches(over, known)} The overridden keys "
                    f"are: {', '.join(known) or 'none'}."
                )
        over = over or REPEATED_BY
        groups: dict[tuple[tuple[str, str], ...], list[tuple[Row, JobFolder]]] = {}
        for row, job in zip(rows, jobs, strict=True):
            if overrides[row.job]:
                groups.setdefault(tuple(one for one in row.overrides.items() if one[0] != over), []).append((row, job))
        is_repeated = over in keys and any(len(own) > 1 for own in groups.values())
        settings = tuple(_setting(dict(rest), own, plan.objective) for rest, own in groups.items())
        exit_code = max((job.exit_code for job in jobs), default=exit_codes.COMPLETE)
        return cls(path, plan, rows, exit_code, over, settings if is_repeated else ())

    @property
    def has_started(self) -> bool:
        """Whether any job has started."""
        return any(row.state is not JobState.NOT_STARTED for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The best job by objective, if any. Incomplete jobs count only if no complete job has an objective."""
        sign = -1 if self.plan.minimize else 1
        return max(self._rated, key=lambda row: sign * (row.objective or 0.0), default=None)

    @property
    def equals(self) -> list[Row]:
        """The jobs that share the best objective. Empty if there are several jobs and all share it, so none is best."""
        best, rated = self.best, self._rated
        equals = [row for row in rated if best is not None and row.objective == best.objective]
        return equals if len(equals) < len(rated) or len(rated) == 1 else []

    @property
    def _rated(self) -> list[Row]:
        rated = [row for row in self.rows if row.objective is not None]
        return [row for row in rated if row.state is JobState.COMPLETE] or rated

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON-ready dict."""
        best = self.best
        data = {
            "schema_version": SCHEMA_VERSION,
            "objective": self.plan.objective,
            "minimize": self.plan.minimize,
            "best": best.job if best is not None else None,
            "jobs": [asdict(row) for row in self.rows],
            "over": self.over if self.settings else None,
            "settings": [asdict(setting) for setting in self.settings],
        }
        return dict(json_ready(data))

    def write(self) -> None:
        """Writes `sweep.json`."""
        write_atomically(self.path / SWEEP_JSON, dump_json(self.to_dict(), indent=2) + "\n")


def _chosen(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    return {key: given[key] for key in keys if key in given}


def pooled(runs: Sequence[RunSummary]) -> RunSummary:
    """Combines the runs of one setting to one run. Attempts of later runs count as more attempts at the same tasks.

    For the interval, tasks are the independent units, because seeds are nested in tasks. It therefore keeps the results
    of all seeds of a task together. Davison & Hinkley (1997, "Bootstrap Methods and their Application", section 3.8)
    show that resampling seeds as well would count their variation twice. The interval of the combined run is computed
    in closed form, without resampling. It does not include effects that all tasks of a run share, such as differences
    between the checkpoints of several training runs.
    """
    stride = 1 + max((result.attempt for run in runs for result in run.results), default=0)
    results = (
        replace(result, attempt=number * stride + result.attempt)
        for number, run in enumerate(runs)
        for result in run.results
    )
    return RunSummary(sum(run.planned for run in runs), tuple(results), threshold=runs[0].threshold)


def _setting(overrides: Mapping[str, str], jobs: Sequence[tuple[Row, JobFolder]], objective: str) -> Setting:
    summaries = [job.summary for _, job in jobs if job.summary is not None]
    whole = _row("", JobFolder(jobs[0][1].path, pooled(summaries) if summaries else None), overrides, objective)
    single = [row.objective for row, _ in jobs if row.objective is not None]
    return Setting(
        overrides=overrides,
        jobs=tuple(row.job for row, _ in jobs),
        started=len(summaries),
        planned=whole.planned,
        finished=whole.finished,
        objective=whole.objective,
        low=whole.low,
        high=whole.high,
        lowest=min(single, default=None),
        highest=max(single, default=None),
    )


def _row(name: str, job: JobFolder, overrides: Mapping[str, str], objective: str) -> Row:
    message = job.failure[1] if job.failure is not None else None
    summary = job.summary
    if summary is None:
        return Row(name, overrides, job.state, message=message)
    ended = summary.finished
    found = metrics(RunStatistics.of(ended, planned=summary.planned, threshold=summary.threshold))
    paid = summary.paid()
    return Row(
        name,
        overrides,
        job.state,
        planned=summary.planned,
        finished=len(ended),
        outcomes=summary.count(),
        objective=found.get(PREFIX + objective),
        low=found.get(f"{PREFIX}{objective}_low"),
        high=found.get(f"{PREFIX}{objective}_high"),
        mean_reward=found.get(f"{PREFIX}mean_reward"),
        tokens=int(paid["prompt_tokens"] + paid["generated_tokens"]),
        cost=paid["cost"],
        message=message,
    )


MAX_ROWS = 200
MAX_FAILURES = 5
LEFT_OUT_WHERE_NARROW = ("tokens", "cost", "outcomes", "episodes")


def render_report(report: SweepReport, stream: TextIO) -> None:
    """Writes the report: a table with one row per job, notes, and the combined results of repeated jobs."""
    rows = report.rows[:MAX_ROWS]
    best = report.equals
    keys = dict.fromkeys(key for row in rows for key in row.overrides)
    columns = {
        "job": [row.job + ("*" if row in best else "") for row in rows],
        **{one_line(key): [one_line(unescaped(row.overrides.get(key, "-")), 40) for row in rows] for key in keys},
        "state": [row.state.value for row in rows],
        "episodes": [f"{row.finished}/{row.planned}" if row.planned else "-" for row in rows],
        "outcomes": [", ".join(f"{n} {outcome}" for outcome, n in (row.outcomes or {}).items()) or "-" for row in rows],
        "mean reward": [_number(row.mean_reward) for row in rows],
        report.plan.objective: [_objective(row) for row in rows],
        "tokens": [f"{row.tokens:,}" for row in rows],
        "cost": [f"${row.cost:,.4f}" if row.cost else "-" for row in rows],
    }
    if report.plan.objective == "mean_reward":
        del columns["mean reward"]
    if not any(row.tokens for row in rows):
        del columns["tokens"]
    if not any(row.cost for row in rows):
        del columns["cost"]
    leave_out = [name for name in LEFT_OUT_WHERE_NARROW if name in columns]
    _write_table(columns, {"outcomes", *map(one_line, keys)}, leave_out, stream)
    write(stream, wrapped("\n".join(_lines(report)), stream) + "\n")
    if report.settings:
        render_settings(report, stream)
    stream.flush()


def render_settings(report: SweepReport, stream: TextIO) -> None:
    """Writes a table with one row per setting, which shows the metric over all its jobs."""
    rows = report.settings[:MAX_ROWS]
    keys = dict.fromkeys(key for row in rows for key in row.overrides)
    columns = {
        **{one_line(key): [one_line(row.overrides.get(key, "-"), 40) for row in rows] for key in keys},
        "jobs": [f"{row.started}/{len(row.jobs)}" for row in rows],
        "episodes": [f"{row.finished}/{row.planned}" if row.planned else "-" for row in rows],
        report.plan.objective: [_objective(row) for row in rows],
        "range of jobs": [
            "-" if row.lowest is None else f"{_number(row.lowest)} to {_number(row.highest)}" for row in rows
        ],
    }
    _write_table(columns, {*map(one_line, keys)}, ["range of jobs", "episodes"], stream)
    if len(report.settings) > MAX_ROWS:
        write(stream, f"and {len(report.settings) - MAX_ROWS} more settings (see --json)\n")
    settings = count_of(len(report.settings), "setting")
    write(stream, f"{settings} over `{one_line(report.over)}`; 95 % intervals over tasks and jobs, errors as zero\n")


def _write_table(
    columns: Mapping[str, Sequence[str]], texts: Collection[str], leave_out: Sequence[str], stream: TextIO
) -> None:
    width = shutil.get_terminal_size().columns if stream.isatty() else PIPE_COLUMNS
    table = make_table(columns_that_fit(columns, width, leave_out=leave_out), texts=texts)
    write(stream, "\n" + draw(table, stream, width=width))


def _lines(report: SweepReport) -> Iterator[str]:
    if len(report.rows) > MAX_ROWS:
        yield f"and {len(report.rows) - MAX_ROWS} more jobs, in sweep.json"
    counts = Counter(row.state for row in report.rows)
    states = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts[state])
    yield f"{count_of(len(report.rows), 'job')}: {states}; {report.plan.objective} with 95 % intervals, errors as zero"
    best, equals = report.best, report.equals
    if best is not None and not equals:
        yield f"No job is the best: all have {report.plan.objective} {_number(best.objective)}"
    elif len(equals) > 1:
        named = one_line(", ".join(row.job for row in equals), 200)
        yield f"* best: jobs {named}, all with {report.plan.objective} {_number(equals[0].objective)}"
    elif best is not None and len(report.rows) > 1:
        yield f"* best: {_named(best)}, {report.plan.objective} {_objective(best)}"
        if rivals := sum(_may_equal(best, row) for row in report.rows if row is not best):
            others = f"{rivals} other" if rivals == 1 else f"{rivals} others"
            yield (
                f"  Its interval overlaps with {'that' if rivals == 1 else 'those'} of {others}. To test which "
                f"differences are significant: `ares-exp compare {_shown(report.path)} --all-pairs`."
            )
    failed = [row for row in report.rows if row.message is not None]
    yield from (f"job {row.job} failed: {one_line(row.message or '', 240)}" for row in failed[:MAX_FAILURES])
    if len(failed) > MAX_FAILURES:
        yield f"and {len(failed) - MAX_FAILURES} more failed, see failure.json in their folders"
    if counts[JobState.COMPLETE] < len(report.rows):
        yield f"To continue incomplete jobs: ares-exp resume={_shown(report.path)}"


def _shown(path: Path) -> str:
    return shlex.quote(str(shown_path(path)))


def _named(row: Row) -> str:
    chosen = " ".join(f"{key}={unescaped(value)}" for key, value in row.overrides.items())
    return one_line(f"job {row.job} ({chosen})" if chosen else f"job {row.job}", 200)


def _objective(row: Row | Setting) -> str:
    if row.low is None or row.high is None:
        return _number(row.objective)
    return f"{_number(row.objective)} [{_number(row.low)}, {_number(row.high)}]"


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _may_equal(best: Row, other: Row) -> bool:
    if best.low is None or best.high is None or other.low is None or other.high is None:
        return False
    return other.high >= best.low and best.high >= other.low
