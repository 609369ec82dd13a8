"""The name `latest`, which users can write in commands for the most recently started run or sweep in `outputs/`.

The start time is the first `started` in a run's `sessions.jsonl`, so that resuming, reading or copying a run does not
make it newer. Runs without a start time (for example, merged runs) and the runs of `ares-exp task check` are ignored.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.records.recorded_results import read_sessions
from ares_exp.records.run_dir import EPISODES, SWEEP_RECORD, RunDir
from ares_exp.records.terminal_text import printable

LATEST = "latest"
OUTPUTS = Path("outputs")
CHECKS = OUTPUTS / "task-check"
"""Folder of the runs of `ares-exp task check`."""
MEANING = f"`{LATEST}` is the most recent run under {OUTPUTS}/"
MAX_DEPTH = 4
"""Maximum depth of the folders in `outputs` that are searched for runs."""


def run_path(text: str | Path) -> Path:
    """Returns the path that a user means by `text`. A leading `latest` stands for the path of the latest run or sweep.

    Prints the replacement to stderr. If a file or directory with the name `latest` exists, returns the path unchanged.

    Raises:
        ConfigError: The path starts with `latest`, and there is no run.
    """
    path = Path(text)
    if path.parts[:1] != (LATEST,) or os.path.lexists(LATEST):
        return path
    places = (place for place in _below(OUTPUTS, MAX_DEPTH) if CHECKS not in place.parents)
    started = [(time, place) for place in places if (time := _started(place)) is not None]
    if not started:
        raise ConfigError(
            f"There is no run or sweep under {OUTPUTS}/ in {Path.cwd()} (runs of `task check` are ignored). Name a "
            f"run directory instead of `{LATEST}`, or change to the folder where the run was started."
        )
    _, found = max(started)
    sys.stderr.write(f"`{LATEST}` is {printable(str(found))}\n")
    return found.joinpath(*path.parts[1:])


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the runs and sweeps in `folder` and its subfolders, down to `depth`, but not the runs inside a sweep."""
    try:
        folders = [folder / entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_dir()]
    except OSError:  # the folder is missing or not readable
        return
    for path in folders:
        if any((path / name).is_file() for name in (SWEEP_RECORD, EPISODES)):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def _started(place: Path) -> float | None:
    """Returns the start time of a run, or of a sweep's first job, in epoch seconds; `None` if it is unknown."""
    if (place / SWEEP_RECORD).is_file():
        return min((time for job in _below(place, MAX_DEPTH) if (time := _started(job)) is not None), default=None)
    started = next(read_sessions(RunDir(place)), {}).get("started")
    return started if isinstance(started, float) and math.isfinite(started) else None
