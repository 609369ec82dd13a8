"""`results.json`: totals and statistics of a run, and a row for each task, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ares_exp.records.run_summary import RunSummary
from ares_exp.records.statistics.run_statistics import RunStatistics, json_ready
from ares_exp.records.statistics.task_statistics import TaskStatistics

SCHEMA_VERSION = 1


def results_document(summary: RunSummary) -> dict[str, Any]:
    """Makes the content of `results.json`."""
    statistics = RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold)
    return {
        "schema_version": SCHEMA_VERSION,
        "totals": json_ready(summary.to_dict()),
        "statistics": statistics.to_dict(),
        "tasks": [task_row(task) for task in statistics.tasks],
    }


def task_row(task: TaskStatistics) -> dict[str, Any]:
    """Makes the row of one task, JSON-ready."""
    derived = {
        "attempts": task.attempts,
        "scored": task.scored,
        "pass_rate": task.pass_rate,
        "pass_variance": task.pass_variance,
        "flaky": task.is_flaky,
    }
    row: dict[str, Any] = json_ready({**asdict(task), **derived})
    return row
