"""The totals of a run as its files tell them: of one that has ended, was killed, or is running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object, read_yaml
from ares_exp.records.recorded_results import read_results
from ares_exp.records.run_dir import RunDir
from ares_exp.records.run_summary import RunSummary


def recorded_summary(run_dir: RunDir) -> RunSummary | None:
    """Reads the totals of a run so far; `None` if none was started.

    Raises:
        ConfigError: A record is broken.
    """
    if not run_dir.has_run or not run_dir.episodes.is_file():
        return None
    results = read_results(run_dir.episodes).results
    summary = RunSummary(planned=0, results=results)
    planned = max(_planned(run_dir), len(summary.final))
    totals = read_object(run_dir.summary)
    wall_sec, threshold, ended_by = (totals.get(name) for name in ("wall_sec", "threshold", "ended_by"))
    return RunSummary(
        planned=planned,
        results=results,
        interrupted=totals.get("interrupted") is True,
        ended_by=ended_by if isinstance(ended_by, str) else None,
        wall_sec=float(wall_sec) if isinstance(wall_sec, int | float) else 0.0,
        threshold=float(threshold) if isinstance(threshold, int | float) else 1.0,
        must_pass=totals.get("must_pass") is True,
    )


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; empty if there is no such file.

    Raises:
        ConfigError: It is broken.
    """
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _planned(run_dir: RunDir) -> int:
    """Returns the planned attempts: from the last session's summary, else from the plan; 0 if not known."""
    planned = read_object(run_dir.summary).get("planned")
    if isinstance(planned, int):
        return planned
    tasks = read_object(run_dir.provenance).get("tasks")
    try:
        config = read_yaml(run_dir.config)
    except OSError:
        return 0
    attempts = config.get("attempts") if isinstance(config, dict) else None
    return len(tasks) * attempts if isinstance(tasks, dict | list) and isinstance(attempts, int) else 0
