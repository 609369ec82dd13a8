"""The name `latest` in the place of a run directory.

It is the run or the sweep below `outputs/` of the current directory that was started last: by the first `started` in
its `sessions.jsonl`, so that a resume, a look or a copy makes none newer. A sweep counts as one, its folder, started
when the first of its jobs was. What was never started here, as a merged run, does not count, nor does what `ares-exp
task check` run.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import EPISODES, SWEEP_RECORD, RunDir, open_regular
from ares_exp.records.terminal_text import printable

LATEST = "latest"
OUTPUTS = Path("outputs")
CHECKS = OUTPUTS / "task-check"
"""Where the runs of `ares-exp task check` go."""
MEANING = f"`{LATEST}` is the most recent run under {OUTPUTS}/"
MAX_DEPTH = 4
"""How far below `outputs` runs are looked for."""
MAX_LINE = 1 << 20


def run_path(text: str | Path) -> Path:
    """Returns the path that was typed; if it starts with `latest`, that of this run, and says on stderr which it is.

    A directory or a file that is called `latest` itself goes first.

    Raises:
        ConfigError: It is `latest`, and there is no run.
    """
    path = Path(text)
    if path.parts[:1] != (LATEST,) or os.path.lexists(LATEST):
        return path
    places = (place for place in _below(OUTPUTS, MAX_DEPTH) if CHECKS not in place.parents)
    started = [(time, place) for place in places if (time := _started(place)) is not None]
    if not started:
        raise ConfigError(
            f"Expected a run or a sweep under {OUTPUTS}/ in {Path.cwd()}, as {MEANING}; found none "
            "(runs of `task check` do not count). Name a run directory, or change to the folder where it was started."
        )
    _, found = max(started)
    sys.stderr.write(f"`{LATEST}` is {printable(str(found))}\n")
    return found.joinpath(*path.parts[1:])


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the directories of runs and sweeps below `folder`; none within another."""
    try:
        folders = [folder / entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_dir()]
    except OSError:  # there is none, or it may not be read
        return
    for path in folders:
        if any((path / name).is_file() for name in (SWEEP_RECORD, EPISODES)):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def _started(place: Path) -> float | None:
    """Returns the start of a run, or of the first job of a sweep, in epoch seconds; `None` if it is not recorded."""
    if (place / SWEEP_RECORD).is_file():
        return min((time for job in _below(place, MAX_DEPTH) if (time := _started(job)) is not None), default=None)
    try:
        with open_regular(RunDir(place).sessions) as lines:
            started = float(json.loads(lines.readline(MAX_LINE))["started"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):  # anybody may have written it
        return None
    return started if math.isfinite(started) else None
