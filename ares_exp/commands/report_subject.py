"""What a report is of: the runs that a command line names."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ares_exp.commands.compared_pair import ComparedPair, compare_pairs, pair_document
from ares_exp.commands.compared_runs import MOST_RUNS, choose_runs, differing_config
from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import SWEEP_RECORD, is_run
from ares_exp.records.statistics.comparison import ALPHA, TaskPair
from ares_exp.records.statistics.estimate import mean
from ares_exp.records.statistics.run_statistics import json_ready
from ares_exp.reports.run_payload import ShownRun
from ares_exp.reports.written_report import Subject
from ares_exp.runs.sweeps.sweep_report import SweepReport


def subject_of(path: Path, other: Path | None = None) -> Subject:
    """Finds what to show: a run, a sweep, or with another run both side by side.

    Raises:
        ConfigError: There is no run and no sweep at a path, or a record is broken.
    """
    if other is not None:
        return _two_runs(path, other)
    return _sweep(path) if is_sweep(path) else Subject.of_run(path)


def is_sweep(path: Path) -> bool:
    """Returns whether a folder is a sweep's."""
    return not is_run(path) and (path / SWEEP_RECORD).is_file()


def _two_runs(path: Path, other: Path) -> Subject:
    runs = choose_runs([path, other], threshold=1.0, level=1 - ALPHA)
    if len(runs) != 2:
        raise ConfigError(f"Expected two runs to show side by side, got {len(runs)}. Name two run directories.")
    shown = [ShownRun(run.path) for run in runs]
    threshold = shown[0].summary.threshold
    if threshold != 1.0:
        runs = choose_runs([path, other], threshold=threshold, level=1 - ALPHA)
    (pair,) = compare_pairs([(runs[0], runs[1])], alpha=ALPHA)
    differing = [{"key": key, "values": values} for key, values in differing_config(runs).items()]
    flipped = [task.a.task_name for task in pair.comparison.flips]
    names = [f"{run.letter}: {run.path}" for run in runs]
    return Subject(
        path,
        dict(zip(names, shown, strict=True)),
        {"pair": json_ready({**pair_document(pair), "tasks": _tasks(pair), "differing_config": differing})},
        flipped,
    )


def _tasks(pair: ComparedPair) -> list[dict[str, Any]]:
    return [
        {
            "task_name": task.a.task_name,
            "a": mean(task.a.rewards_with_zeros),
            "b": mean(task.b.rewards_with_zeros),
            "difference": mean(task.b.rewards_with_zeros) - mean(task.a.rewards_with_zeros),
            "flipped": bool(task.difference),
            **_counts(task),
        }
        for task in pair.comparison.pairs
    ]


def _counts(task: TaskPair) -> dict[str, int]:
    sides = {"a": task.a, "b": task.b}
    return {f"{name}_{what}": getattr(one, what) for name, one in sides.items() for what in ("passed", "attempts")}


def _sweep(path: Path) -> Subject:
    report = SweepReport.read(path)
    started = [row.job for row in report.rows if is_run(path / row.job)][:MOST_RUNS]
    numbers = {job: number for number, job in enumerate(started)}
    keys = list(dict.fromkeys(key for row in report.rows for key in row.overrides))
    jobs = [{**asdict(row), "run": numbers.get(row.job)} for row in report.rows]
    sweep = {**report.to_dict(), "path": str(path), "keys": keys, "jobs": json_ready(jobs)}
    names = {row.job: " ".join(f"{key}={value}" for key, value in row.overrides.items()) for row in report.rows}
    return Subject(path, {f"{job}: {names[job]}": ShownRun(path / job) for job in started}, {"sweep": sweep})
