"""The end of a run for people: a table by task, the totals, where everything is, what has no reward."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ares_exp.progress import encodable, format_duration, format_number
from ares_exp.results import EpisodeResult, RunSummary, count_outcomes

if TYPE_CHECKING:
    from rich.table import Table

_MAX_TASKS = 200
_MAX_UNSCORED = 10


def render_summary(summary: RunSummary, *, run_dir: Path, stream: TextIO | None = None) -> None:
    """Writes the summary of a run.

    Args:
        summary: What the run adds up to.
        run_dir: The run directory; what exists in it is listed.
        stream: Where to write; standard output by default. Colours and frames adapt to it and to NO_COLOR.
    """
    stream = stream if stream is not None else sys.stdout
    separator = " · " if encodable("·", stream) else " | "
    if summary.results:
        write(stream, draw(_table(summary.results), stream))
    lines = [separator.join(_totals(summary)), *_snapshots(summary), "", *_places(run_dir), *_unscored(summary)]
    if summary.recording_failures:
        lines += [
            "",
            f"Not everything was recorded: {summary.recording_failures} failures, see the warnings in run.log.",
        ]
    write(stream, "\n".join(lines) + "\n")
    stream.flush()


def _table(results: Sequence[EpisodeResult]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    table.add_column("task", overflow="fold")
    for name in ("attempts", "reward"):
        table.add_column(name, justify="right")
    table.add_column("outcome", overflow="fold")
    for name in ("steps", "seconds"):
        table.add_column(name, justify="right")
    tasks = groupby(sorted(results, key=_task_name), key=_task_name)
    rows = [_row(name, list(attempts)) for name, attempts in tasks]
    for row in rows[:_MAX_TASKS]:
        table.add_row(*map(Text, row))
    if len(rows) > _MAX_TASKS:
        table.caption = f"and {len(rows) - _MAX_TASKS} more tasks, in episodes.jsonl"
    elif len(results) > len(rows):
        table.caption = "reward, steps and seconds: means over the attempts"
    return table


def _row(name: str, attempts: Sequence[EpisodeResult]) -> tuple[str, ...]:
    rewards = [result.reward for result in attempts if result.reward is not None]
    steps = _mean([result.num_steps for result in attempts])
    return (
        name,
        str(len(attempts)),
        format_number(_mean(rewards)) if rewards else "-",
        _outcomes(attempts),
        f"{steps:.0f}" if steps.is_integer() else f"{steps:.1f}",
        f"{_mean([result.duration_sec for result in attempts]):.1f}",
    )


def _outcomes(attempts: Sequence[EpisodeResult]) -> str:
    counts = count_outcomes(attempts)
    return ", ".join(counts) if len(attempts) == 1 else ", ".join(f"{n} {outcome}" for outcome, n in counts.items())


def _totals(summary: RunSummary) -> Iterator[str]:
    totals = summary.to_dict()
    if summary.mean_reward is None:
        yield "no reward"
    else:
        yield f"mean reward {format_number(summary.mean_reward)} over {len(summary.scored)} scored"
    yield f"{len(summary.results)} of {summary.planned} episodes finished"
    tokens = totals["prompt_tokens"] + totals["generated_tokens"]
    if tokens:
        yield f"{tokens:,} tokens ({totals['generated_tokens']:,} generated)"
    if totals["cost"] > 0:
        yield f"${totals['cost']:,.4f}"
    yield format_duration(summary.wall_sec)
    if summary.interrupted:
        yield "interrupted"


def _snapshots(summary: RunSummary) -> Iterator[str]:
    """Where the snapshots are, and how many could not be taken."""
    kept = sum(result.snapshots for result in summary.results)
    failed = sum(result.snapshot_failures for result in summary.results)
    if summary.snapshot_dir is not None and kept:
        yield f"{kept:,} {'snapshot' if kept == 1 else 'snapshots'} in {_shown(summary.snapshot_dir)}"
    if failed:
        yield f"{failed:,} {'snapshot' if failed == 1 else 'snapshots'} failed, see run.log"


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _places(run_dir: Path) -> Iterator[str]:
    """Everything in the run directory, a path a line."""
    shown = _shown(run_dir)
    if not run_dir.is_dir():
        return
    yield f"Written to {shown}"
    for path in sorted(run_dir.iterdir()):
        yield f"  {shown / path.name}{os.sep if path.is_dir() else ''}"


def _unscored(summary: RunSummary) -> Iterator[str]:
    results = [result for result in summary.results if result.reward is None]
    if not results:
        return
    yield ""
    yield "Without a reward:"
    for result in results[:_MAX_UNSCORED]:
        yield f"  {result.task_name} (attempt {result.attempt}): {_why(result)}"
    if len(results) > _MAX_UNSCORED:
        yield f"  and {len(results) - _MAX_UNSCORED} more, in episodes.jsonl"


def _why(result: EpisodeResult) -> str:
    """Outcome and error in one line."""
    if result.error is None:
        return result.outcome.value
    text = " ".join(result.error.message.split())
    if text == result.error.type:
        return f"{result.outcome.value}: {text}"
    shown = text if len(text) <= 240 else f"{text[:100]} ... {text[-140:]}"
    return f"{result.outcome.value}: {result.error.type}: {shown}"


def draw(table: Table, stream: TextIO) -> str:
    """A table as text, with the colours and frames that `stream` can show; see also NO_COLOR."""
    from rich.console import Console

    console = Console(file=stream, color_system=None if os.environ.get("NO_COLOR") else "auto", highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def write(stream: TextIO, text: str) -> None:
    """Writes `text`, with a `?` for what the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def _task_name(result: EpisodeResult) -> str:
    return result.task_name


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
