"""The summary that is printed after a run: a table by task, the totals, reasons for missing rewards, and paths."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from ares_exp.errors import may_pass
from ares_exp.records.recorded_results import last_attempts, object_or_empty
from ares_exp.records.results import HOST_IMAGE, UNFINISHED, EpisodeResult, RunSummary, count_outcomes, reward_names
from ares_exp.records.run_dir import RUN_FILES, RUN_FOLDERS, RunDir, resume_command
from ares_exp.records.statistics.estimate import Estimate, mean
from ares_exp.records.statistics.run_statistics import PassRate, RunStatistics, by_task
from ares_exp.records.terminal_text import (
    COLUMN_GAP,
    count_of,
    draw,
    first_of,
    format_duration,
    format_number,
    one_line,
    printable,
    separator,
    shown_path,
    width_of,
    wrapped,
    write,
)

if TYPE_CHECKING:
    from rich.table import Table

GROUPS = ("env", "agent", "container", "policy")
_MAX_TASKS = 40
"""Maximum number of tasks in the table. If there are more, only the tasks with the lowest rewards are shown."""
_MAX_UNSCORED = 10
_MAX_ALIKE = 3
"""Maximum number of attempts that are listed for each reason why a reward is missing. Other attempts are only counted.
"""
_MAX_REWARDS = 4
"""Maximum number of columns for named rewards. At least half of the attempts must have such a reward."""
_TASK_COLUMNS = 24
"""Width to which the column of task names is reduced on narrow terminals. Longer names are wrapped."""
_FRAME = 3
"""Number of characters that a column needs in addition to its text, for its frame and padding."""
_VERIFIER = "verifier"
"""Title of the column with the verifier's reward, if scorers also have columns."""
_MAX_FLAKY = 8
_MAX_MESSAGE = 1_000
"""Maximum number of characters that are shown of an error's first line."""
_MAX_LINE = 200
_LAST_LINES = 8
"""Number of lines from the end of an error message that are shown below its first line.

These lines are usually the output of a program, and contain the reason for the failure.
"""


def render_summary(summary: RunSummary, *, run_dir: Path, stream: TextIO) -> None:
    """Writes the summary of a run to `stream`, ending with commands to show or resume the run."""
    if summary.results:
        write(stream, draw(_table(summary.final, width_of(stream)), stream))
    statistics = RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold)
    rates, variation = list(_pass_rates(statistics, width_of(stream))), list(_variation(summary, statistics))
    lines = [
        separator(stream).join(_totals(summary, statistics)),
        *rates,
        *([""] if rates and variation else []),
        *variation,
        *_snapshots(summary),
        *_unscored(summary),
    ]
    if summary.recording_failures:
        lines += [
            "",
            f"Some data was not recorded (failures: {summary.recording_failures}). See the warnings in run.log.",
        ]
    write(stream, "\n".join([*(wrapped(line, stream) for line in lines), *_places(summary, run_dir, stream)]) + "\n")
    stream.flush()


def render_job(summary: RunSummary, *, name: str, run_dir: Path, stream: TextIO) -> None:
    """Writes one line about a job of a sweep: its name, its totals and the path of its run directory."""
    statistics = RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold)
    errors = [f"errors: {_counts(statistics.errors)}"] if statistics.errors else []
    told = separator(stream).join([*_totals(summary, statistics), *errors, str(shown_path(run_dir))])
    write(stream, wrapped(f"{name}: {told}", stream) + "\n")
    stream.flush()


def _table(results: Sequence[EpisodeResult], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    tasks = list(by_task(results).values())
    shown = tasks if len(tasks) <= _MAX_TASKS else sorted(tasks, key=_success)[:_MAX_TASKS]
    usual = [
        one for one in reward_names(results) if 2 * sum(one in result.rewards for result in results) >= len(results)
    ]
    named = usual[:_MAX_REWARDS]
    by_name = [_VERIFIER if name == "reward" else name for name in named]
    titles = ["task", "attempts", "reward", *by_name, "outcome", "steps", "seconds"]
    rows = [_row(attempts, named) for attempts in shown]
    *others, outcome, steps, seconds = range(len(titles))
    natural = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    widths = [min(natural[0], _TASK_COLUMNS), *natural[1:]]
    widths[outcome] = max(len(word) for row in (titles, *rows) for word in row[outcome].split())
    kept = list(range(len(titles)))
    for column in (seconds, steps, 1, *reversed(others[3:])):
        if _width(kept, widths) > width:
            kept.remove(column)
    for column in (0, outcome):
        widths[column] = min(natural[column], widths[column] + max(width - _width(kept, widths), 0))
    table = Table(header_style="bold")
    for column in kept:
        justify: Literal["left", "right"] = "left" if column in (0, outcome) else "right"
        table.add_column(Text(titles[column]), justify=justify, overflow="fold", width=widths[column])
    for row in rows:
        table.add_row(*(Text(row[column]) for column in kept))
    notes = []
    if len(tasks) > len(shown):
        notes.append(f"{len(shown)} of {len(tasks)} tasks with the lowest rewards; episodes.jsonl has all tasks")
    if hidden := len(usual) - sum(column in others[3:] for column in kept):
        notes.append(f"episodes.jsonl has {count_of(hidden, 'more named reward')}")
    if not notes and len(results) > len(rows):
        notes.append("rewards, steps and seconds: means over the attempts")
    table.caption = "; ".join(notes) or None
    return table


def _width(columns: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[column] + _FRAME for column in columns) + 1


def _success(attempts: Sequence[EpisodeResult]) -> tuple[float, int]:
    """Returns a sort key: the mean reward (0 for a missing reward), then the number of missing rewards, descending."""
    rewards = [result.reward for result in attempts if result.reward is not None]
    return sum(rewards) / len(attempts), len(rewards) - len(attempts)


def _row(attempts: Sequence[EpisodeResult], named: Sequence[str]) -> tuple[str, ...]:
    rewards = [[result.reward for result in attempts if result.reward is not None]]
    rewards += [[result.rewards[one] for result in attempts if one in result.rewards] for one in named]
    steps = mean([result.num_steps for result in attempts])
    return (
        attempts[0].task_name,
        str(len(attempts)),
        *(format_number(mean(values)) if values else "-" for values in rewards),
        _outcomes(attempts),
        f"{steps:.0f}" if steps.is_integer() else f"{steps:.1f}",
        f"{mean([result.duration_sec for result in attempts]):.1f}",
    )


def _outcomes(attempts: Sequence[EpisodeResult]) -> str:
    counts = count_outcomes(attempts)
    return ", ".join(counts) if len(attempts) == 1 else ", ".join(f"{n} {outcome}" for outcome, n in counts.items())


def _totals(summary: RunSummary, statistics: RunStatistics) -> Iterator[str]:
    totals = summary.to_dict()
    scored, every = statistics.scored_only, statistics.errors_as_zero
    if scored.mean_reward is None:
        yield "no reward"
    else:
        alone = " attempts at one task" if scored.mean_reward.unit == "attempts" and scored.attempts > 1 else ""
        yield f"mean reward {format_estimate(scored.mean_reward)} over {scored.attempts} scored{alone}"
        if every.mean_reward is not None and every.attempts > scored.attempts:
            yield f"{format_estimate(every.mean_reward)} over all {every.attempts}, errors as zero"
    yield f"{len(summary.finished)} of {summary.planned} episodes finished"
    tokens = totals["prompt_tokens"] + totals["generated_tokens"]
    if tokens:
        yield f"{tokens:,} tokens ({totals['generated_tokens']:,} generated)"
    if totals["cost"] > 0:
        yield f"${totals['cost']:,.4f}"
    if (used := summary.environment_usage) is not None and (used.tokens or used.cost):
        who = " and ".join(summary.spenders) or "the environment's own"
        yield f"{who}: {used.tokens:,} tokens" + (f", ${used.cost:,.4f}" if used.cost else "")
    yield format_duration(summary.wall_sec)
    if summary.interrupted:
        yield "interrupted"
    if summary.ended_by is not None:
        yield summary.ended_by


def _pass_rates(statistics: RunStatistics, width: int) -> Iterator[str]:
    """Yields the lines of a table of pass@k and pass^k, with one row for each k.

    Yields nothing if no task has more than one attempt. If some attempts have no reward, additional columns show the
    rates in which these attempts count as reward 0. Columns that do not fit into `width` are moved to another table.
    """
    views = [statistics.scored_only]
    if statistics.errors_as_zero.attempts > statistics.scored_only.attempts:
        views.append(statistics.errors_as_zero)
    if len(views[-1].pass_rates) < 2:
        return
    titles = ["pass@k", "pass^k", "pass@k, errors as zero", "pass^k, errors as zero"][: 2 * len(views)]
    rows = [
        [cell for rate, view in zip(rates, views, strict=True) for cell in _cells(rate, view.tasks)]
        for rates in zip(*(view.pass_rates for view in views), strict=True)
    ]
    ks = ["k", *(str(rate.k) for rate in views[0].pass_rates)]
    lines = list(ks)
    for column in zip(titles, *rows, strict=True):
        if lines != ks and max(map(len, lines)) + COLUMN_GAP + max(map(len, column)) > width:
            yield from ("", *lines)
            lines = list(ks)
        before = max(map(len, lines)) + COLUMN_GAP
        lines = [line.ljust(before) + cell for line, cell in zip(lines, column, strict=True)]
    yield from ("", *lines)
    if any(reward not in (0.0, 1.0) for task in statistics.tasks for reward in task.scored_rewards):
        yield f"pass: a reward of {format_number(statistics.threshold)} or more"


def _cells(rate: PassRate, tasks: int) -> Iterator[str]:
    for estimate in (rate.pass_at_k, rate.pass_hat_k):
        if estimate is None:
            yield "-"
        else:
            few = f" (of {count_of(estimate.tasks, 'task')})" if estimate.tasks < tasks else ""
            yield f"{format_estimate(estimate)}{few}"


def _variation(summary: RunSummary, statistics: RunStatistics) -> Iterator[str]:
    """Yields lines about flaky tasks, retries, errors, limits, and responses that were malformed or cut off."""
    flaky = [f"{task.task_name} {task.passed}/{task.scored}" for task in statistics.tasks if task.is_flaky]
    if flaky:
        yield f"{len(flaky)} of {len(statistics.tasks)} tasks flaky: {first_of(flaky, _MAX_FLAKY)}"
    if statistics.retried:
        yield (
            f"{statistics.retried} of {count_of(statistics.attempts, 'attempt')} ran again; "
            f"earlier episodes: {_counts(statistics.retried_errors)}"
        )
    if sum(statistics.errors.values()) > 1:
        yield f"errors: {_counts(statistics.errors)}"
    limits = Counter(result.limit for result in summary.final if result.limit is not None)
    if limits:
        yield f"truncated: {', '.join(f'{number} by {limit}' for limit, number in limits.most_common())}"
    if (count := sum(result.format_errors for result in summary.final)) > 0:
        yield f"format errors: {_in_episodes(count, [one.format_errors for one in summary.final])}"
    if (count := sum(result.length_stops for result in summary.final)) > 0:
        cut = _in_episodes(count, [one.length_stops for one in summary.final])
        yield f"responses cut off at the limit on output tokens (finish_reason=length): {cut}"
    if any(result.container_image == HOST_IMAGE for result in summary.final):
        yield "container=local ignores the FROM image: commands use the programs of this machine"


def _in_episodes(count: int, counts: Sequence[int]) -> str:
    return f"{count:,} in {count_of(sum(one > 0 for one in counts), 'episode')}"


def _counts(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in errors.items()) or "no errors"


def format_estimate(estimate: Estimate) -> str:
    """Formats a mean with its interval, such as `0.67 [0.35, 0.88]`. Omits the interval if it is unknown."""
    if estimate.low is None or estimate.high is None:
        return format_number(estimate.value)
    return f"{format_number(estimate.value)} [{format_number(estimate.low)}, {format_number(estimate.high)}]"


def _snapshots(summary: RunSummary) -> Iterator[str]:
    kept = sum(result.snapshots for result in summary.results)
    failed = sum(result.snapshot_failures for result in summary.results)
    if summary.snapshot_dir is not None and kept:
        yield f"{count_of(kept, 'snapshot')} in {shown_path(summary.snapshot_dir)}"
    if failed:
        yield f"{count_of(failed, 'snapshot')} failed, see run.log"


def _places(summary: RunSummary, run_dir: Path, stream: TextIO) -> Iterator[str]:
    if not run_dir.is_dir():
        return
    shown = shown_path(run_dir)
    parts = [f"Written to {shown}"]
    if any((run_dir / name).exists() for name in (*RUN_FOLDERS, *RUN_FILES)):
        parts.append(f"show: ares-exp show {shlex.quote(str(shown))}")
    if RunDir(run_dir).sessions.is_file():
        resume = resume_command(run_dir, shown)
        if len(summary.finished) < summary.planned:
            parts.append(f"continue: {resume}")
        lost = {
            one.outcome for one in summary.finished if one.reward is None and one.error and may_pass(one.error.type)
        }
        if lost:
            redo = shlex.quote(f"resume_redo=[{','.join(sorted(lost))}]")
            parts.append(f"retry infrastructure errors: {resume} {redo}")
    yield ""
    yield from filter(None, [" ".join(f"{key}={value}" for key, value in run_facts(RunDir(run_dir)).items())])
    is_narrow = stream.isatty() and len("; ".join(parts)) > width_of(stream)
    yield ("\n" if is_narrow else "; ").join(parts)


def run_facts(run: RunDir) -> dict[str, str]:
    """Returns the main settings of a run by config key, such as `env`, `model` and `seed`. Omits unknown values."""
    choices = object_or_empty(run.provenance).get("choices")
    options = choices if isinstance(choices, Mapping) else {}
    values = object_or_empty(run.config)
    policy = values.get("policy")
    found = {
        **{group: options.get(group) for group in GROUPS},
        "model": policy.get("model") if isinstance(policy, Mapping) else None,
        "attempts": last_attempts(run) or values.get("attempts"),  # a resume can raise them
        "seed": values.get("seed"),
    }
    return {key: str(value) for key, value in found.items() if isinstance(value, str | int)}


def _unscored(summary: RunSummary) -> Iterator[str]:
    results = [result for result in summary.final if result.reward is None]
    failed = [result for result in results if result.outcome not in UNFINISHED]
    never_started = summary.planned - len(summary.final)
    if not results and never_started <= 0:
        return
    yield ""
    yield "Without a reward:"
    reasons: dict[str, list[str]] = {}
    for result in failed:
        first, *others = _error(result)
        note = "" if result.note is None else f"; {result.note}"
        cut = [f"[… {count_of(len(others) - _LAST_LINES, 'line')} …]"] if len(others) > _LAST_LINES else []
        why = f"\n{4 * ' '}".join([first + note, *cut, *others[-_LAST_LINES:]])
        reasons.setdefault(why, []).append(f"{result.task_name} (attempt {result.attempt})")
    for why, attempts in list(reasons.items())[:_MAX_UNSCORED]:
        yield from f"  {first_of(attempts, _MAX_ALIKE)}: {why}".splitlines()
    if hidden := sum(map(len, list(reasons.values())[_MAX_UNSCORED:])):
        yield f"  and {hidden} more, in episodes.jsonl"
    if cut_short := len(results) - len(failed):
        yield f"  {count_of(cut_short, 'attempt')} interrupted"
    if never_started > 0:
        yield f"  {count_of(never_started, 'attempt')} never started"


def _error(result: EpisodeResult) -> list[str]:
    if result.error is None:
        return [result.outcome.value]
    first, *others = [line.rstrip() for line in printable(result.error.message).splitlines() if line.strip()] or [""]
    if first == result.error.type:
        return [f"{result.outcome.value}: {first}", *others]
    shown = first if len(first) <= _MAX_MESSAGE else f"{first[:_MAX_MESSAGE]}… (complete in episodes.jsonl)"
    return [f"{result.outcome.value}: {result.error.type}: {shown}", *(one_line(line, _MAX_LINE) for line in others)]
