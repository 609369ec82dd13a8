"""The folder of one job of a sweep, from which the job's state and results are read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.record_files import read_json_object, read_yaml
from ares_exp.records.recorded_results import recorded_summary
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import HYDRA_RECORDS, RunDir, dump_json, write_atomically
from ares_exp.records.secrets import MASK, scrub, typed_secrets
from ares_exp.runs.resume.recorded_run import recorded_config
from ares_exp.runs.resume.session import KEYS_THAT_MAY_CHANGE, config_differences

logger = logging.getLogger(__name__)

FAILURE = "failure.json"
MAX_CHARS = 20_000


class FailureNote:
    """The file `failure.json` in the folder of a job, which records that the job was rejected or failed."""

    def __init__(self, job_dir: Path) -> None:
        self.path = job_dir / FAILURE

    def write(self, exit_code: int, message: str) -> None:
        """Writes the file. An error is only logged, because a job without results counts as incomplete in any case."""
        for secret in typed_secrets(sys.argv[1:]):
            message = message.replace(secret, MASK)
        note = {"exit_code": exit_code, "message": message[:MAX_CHARS]}
        try:
            write_atomically(self.path, dump_json(note, indent=2) + "\n")
        except OSError as error:
            logger.warning("Writing %s failed: %s", self.path, error)

    def remove(self) -> None:
        """Removes the file at the end of a later session that has results."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def read(self) -> tuple[int, str] | None:
        """Reads the exit code and the message; `None` if the file is missing. Raises `ConfigError` if it is invalid."""
        try:
            note = read_json_object(self.path, max_bytes=8 * MAX_CHARS)
            code, message = note["exit_code"], note["message"]
        except FileNotFoundError:
            return None
        except (OSError, KeyError) as error:
            raise ConfigError(f"{self.path} is broken: {error!r:.200}.") from None
        return (code if code == exit_codes.USAGE else exit_codes.INCOMPLETE), str(message)[:MAX_CHARS]


DEPTH = 4
"""Maximum depth of job folders below the sweep's folder. `hydra.sweep.subdir` can name nested folders."""

OF_THE_SUMMARY = ("attempts", "branches", "reward_threshold")
"""Keys that may change when a job is resumed. They change its summary, so even a complete job runs again."""


class JobState(StrEnum):
    """The state of a job of a sweep."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The state and the results of a job, as read from its folder.

    Attributes:
        path: Path of the folder.
        summary: Totals of the job's run so far; `None` if no run was started.
        failure: Exit code and message if the job was rejected or failed; `None` otherwise.
    """

    path: Path
    summary: RunSummary | None = None
    failure: tuple[int, str] | None = None

    @classmethod
    def read(cls, path: Path) -> JobFolder:
        """Reads the folder. Raises `ConfigError` if a record is broken."""
        return cls(path, recorded_summary(RunDir(path)), FailureNote(path).read())

    @property
    def state(self) -> JobState:
        """The state of the job."""
        if self.failure is not None:
            return JobState.FAILED
        if self.summary is None:
            return JobState.NOT_STARTED
        return JobState.COMPLETE if self.summary.planned and self.summary.complete else JobState.INCOMPLETE

    @property
    def exit_code(self) -> int:
        """The exit code of the job. The exit code of the whole sweep is the highest exit code of its jobs."""
        if self.failure is not None:
            return self.failure[0]
        is_well = self.state is JobState.COMPLETE and self.summary is not None and not self.summary.broken
        return exit_codes.COMPLETE if is_well else exit_codes.INCOMPLETE

    def overrides(self) -> Sequence[str]:
        """Returns the overrides that Hydra recorded for the job, if any. Raises `ConfigError` if they are invalid."""
        try:
            found = read_yaml(self.path / HYDRA_RECORDS / "overrides.yaml")
        except OSError:
            return ()
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def is_done(self, config: Mapping[str, Any]) -> bool:
        """Returns whether a resumed sweep can skip this job: it is complete, and `config` asks for nothing new."""
        if self.state is not JobState.COMPLETE or config["resume_redo"]:
            return False
        try:
            recorded = recorded_config(self.path)
        except OSError:
            return False
        may_differ = [key for key in KEYS_THAT_MAY_CHANGE if key not in OF_THE_SUMMARY]
        return not any(config_differences(recorded, scrub(config), may_differ=may_differ))


def job_folders(sweep_dir: Path, *, depth: int = DEPTH) -> Iterator[Path]:
    """Yields the folders of those jobs of a sweep that have started. Numbered folders are in numeric order."""
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
