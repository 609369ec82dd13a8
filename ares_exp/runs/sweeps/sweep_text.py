"""The summary of a sweep for people: a table of its jobs, and what to make of it."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ares_exp.records.terminal_text import PIPE_COLUMNS, draw, format_number, one_line, write
from ares_exp.records.text_table import columns_that_fit, make_table
from ares_exp.runs.sweeps.job_folder import JobState

if TYPE_CHECKING:
    from ares_exp.runs.sweeps.sweep_report import Row, SweepReport

MAX_ROWS = 200
MAX_FAILURES = 5
LEFT_OUT_WHERE_NARROW = ("tokens", "cost", "outcomes", "episodes")


def render_report(report: SweepReport, stream: TextIO) -> None:
    """Writes the summary of a sweep."""
    width = shutil.get_terminal_size().columns if stream.isatty() else PIPE_COLUMNS
    rows = report.rows[:MAX_ROWS]
    best = report.best
    keys = dict.fromkeys(key for row in rows for key in row.overrides)
    columns = {
        "job": [row.job + ("*" if row is best else "") for row in rows],
        **{one_line(key): [one_line(row.overrides.get(key, "-"), 40) for row in rows] for key in keys},
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
    fitting = columns_that_fit(columns, width, leave_out=[name for name in LEFT_OUT_WHERE_NARROW if name in columns])
    write(stream, "\n" + draw(make_table(fitting, texts={"outcomes", *map(one_line, keys)}), stream, width=width))
    write(stream, "\n".join(_lines(report)) + "\n")
    stream.flush()


def _lines(report: SweepReport) -> Iterator[str]:
    if len(report.rows) > MAX_ROWS:
        yield f"and {len(report.rows) - MAX_ROWS} more jobs, in sweep.json"
    counts = Counter(row.state for row in report.rows)
    states = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts[state])
    jobs = "1 job" if len(report.rows) == 1 else f"{len(report.rows)} jobs"
    yield f"{jobs}: {states}; {report.plan.objective} with 95 % intervals, errors as zero"
    best = report.best
    if best is not None and len(report.rows) > 1:
        yield f"* best: {_named(best)}, {report.plan.objective} {_objective(best)}"
        if rivals := sum(_may_equal(best, row) for row in report.rows if row is not best):
            others = f"{rivals} other" if rivals == 1 else f"{rivals} others"
            yield (
                f"  Its interval overlaps with {'that' if rivals == 1 else 'those'} of {others}: "
                f"`ares-exp compare {_shown(report.path)} --all-pairs` reports what differs by more than chance."
            )
    failed = [row for row in report.rows if row.message is not None]
    yield from (f"job {row.job} failed: {one_line(row.message or '', 240)}" for row in failed[:MAX_FAILURES])
    if len(failed) > MAX_FAILURES:
        yield f"and {len(failed) - MAX_FAILURES} more failed, see failure.json in their folders"
    if counts[JobState.COMPLETE] < len(report.rows):
        yield f"To go on with what is not complete: ares-exp resume={_shown(report.path)}"


def _shown(path: Path) -> str:
    """Formats a path as it can be typed here."""
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(here))


def _named(row: Row) -> str:
    chosen = " ".join(f"{key}={value}" for key, value in row.overrides.items())
    return one_line(f"job {row.job} ({chosen})" if chosen else f"job {row.job}", 200)


def _objective(row: Row) -> str:
    if row.low is None or row.high is None:
        return _number(row.objective)
    return f"{_number(row.objective)} [{_number(row.low)}, {_number(row.high)}]"


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _may_equal(best: Row, other: Row) -> bool:
    if best.low is None or best.high is None or other.low is None or other.high is None:
        return False
    return other.high >= best.low and best.high >= other.low
