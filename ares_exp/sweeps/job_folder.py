"""What a job of a sweep has left in its folder, while the sweep runs, when it has ended, or when it was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ares_exp import exit_codes
from ares_exp.errors import ConfigError
from ares_exp.hydra_resolvers import HYDRA_RECORDS
from ares_exp.record_files import read_json_object, read_yaml
from ares_exp.recorded_results import read_results
from ares_exp.run_dir import RunDir
from ares_exp.run_summary import RunSummary
from ares_exp.secrets import scrub
from ares_exp.sweeps.failure_note import FailureNote

DEPTH = 4
"""`hydra.sweep.subdir` may name folders in folders."""

OF_NO_RESULT = frozenset(
    {"resume", "resume_redo", "resume_diverged", "resume_force", "concurrency", "objective", "tracker", "budget"}
)
"""Keys that a complete job may have had otherwise, and is complete still."""


class JobState(StrEnum):
    """How far a job is."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """A job's folder, read.

    Attributes:
        path: The folder.
        summary: What its run adds up to so far; `None` where none was begun.
        failure: Exit code and message, where it was refused or failed.
    """

    path: Path
    summary: RunSummary | None = None
    failure: tuple[int, str] | None = None

    @classmethod
    def read(cls, path: Path) -> JobFolder:
        """Reads what there is.

        Raises:
            ConfigError: A record is broken.
        """
        return cls(path, _summary(RunDir(path)), FailureNote(path).read())

    @property
    def state(self) -> JobState:
        """How far the job is."""
        if self.failure is not None:
            return JobState.FAILED
        if self.summary is None:
            return JobState.NOT_STARTED
        return JobState.COMPLETE if self.summary.planned and self.summary.complete else JobState.INCOMPLETE

    @property
    def exit_code(self) -> int:
        """What the job makes the exit code of its sweep at least."""
        if self.failure is not None:
            return self.failure[0]
        return exit_codes.COMPLETE if self.state is JobState.COMPLETE else exit_codes.INCOMPLETE

    def overrides(self) -> Sequence[str]:
        """As Hydra recorded them; none where it could not.

        Raises:
            ConfigError: The record is broken.
        """
        try:
            found = read_yaml(self.path / HYDRA_RECORDS / "overrides.yaml")
        except OSError:
            return ()
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def is_done(self, config: Mapping[str, Any]) -> bool:
        """Whether the job is complete, as this config asks for it."""
        if self.state is not JobState.COMPLETE or config["resume_redo"]:
            return False
        try:
            recorded = read_yaml(RunDir(self.path).config)
        except OSError:
            return False
        return isinstance(recorded, dict) and _that_counts(recorded) == _that_counts(scrub(config))


def job_folders(sweep_dir: Path, *, depth: int = DEPTH) -> Iterator[Path]:
    """The folders that jobs of a sweep have begun to write in, those with numbers in their order."""
    try:
        folders = [path for path in sweep_dir.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        raise ConfigError(f"Cannot read {sweep_dir}: {error.strerror}.") from None
    for folder in sorted(folders, key=_order):
        if (folder / HYDRA_RECORDS).is_dir() or RunDir(folder).has_run:
            yield folder
        elif depth > 1:
            yield from job_folders(folder, depth=depth - 1)


def _order(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() and len(path.name) < 10 else 0, path.name)


def _summary(run_dir: RunDir) -> RunSummary | None:
    if not run_dir.has_run or not run_dir.episodes.is_file():
        return None
    results = read_results(run_dir.episodes).results
    summary = RunSummary(planned=0, results=results)
    planned = max(_planned(run_dir), len(summary.final))
    totals = _object(run_dir.summary)
    wall_sec, threshold = totals.get("wall_sec"), totals.get("threshold")
    return RunSummary(
        planned=planned,
        results=results,
        interrupted=totals.get("interrupted") is True,
        wall_sec=float(wall_sec) if isinstance(wall_sec, int | float) else 0.0,
        threshold=float(threshold) if isinstance(threshold, int | float) else 1.0,
    )


def _planned(run_dir: RunDir) -> int:
    """Attempts asked for: as the last session's summary says, else what was to be played; 0 if that is not known."""
    planned = _object(run_dir.summary).get("planned")
    if isinstance(planned, int):
        return planned
    tasks = _object(run_dir.provenance).get("tasks")
    try:
        config = read_yaml(run_dir.config)
    except OSError:
        return 0
    attempts = config.get("attempts") if isinstance(config, dict) else None
    return len(tasks) * attempts if isinstance(tasks, dict | list) and isinstance(attempts, int) else 0


def _object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; an empty one where there is no such file.

    Raises:
        ConfigError: It is broken.
    """
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _that_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in OF_NO_RESULT}
