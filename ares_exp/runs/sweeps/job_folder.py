"""The folder of a job in a sweep, with the state and the results of the job."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ares_exp.config.hydra_setup import HYDRA_RECORDS
from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.record_files import read_json_object, read_yaml
from ares_exp.records.recorded_results import recorded_summary
from ares_exp.records.run_dir import RunDir, dump_json, write_atomically
from ares_exp.records.run_summary import RunSummary
from ares_exp.records.secrets import MASK, scrub, typed_secrets
from ares_exp.runs.resume.recorded_run import recorded_config
from ares_exp.runs.resume.session import KEYS_THAT_MAY_CHANGE, config_differences

logger = logging.getLogger(__name__)

FAILURE = "failure.json"
MAX_CHARS = 20_000


class FailureNote:
    """The record of a job's failure (`<job>/failure.json`)."""

    def __init__(self, job_dir: Path) -> None:
        self.path = job_dir / FAILURE

    def write(self, exit_code: int, message: str) -> None:
        """Writes the record. If this fails, only logs a warning, because the job counts as incomplete in any case."""
        for secret in typed_secrets(sys.argv[1:]):
            message = message.replace(secret, MASK)
        note = {"exit_code": exit_code, "message": message[:MAX_CHARS]}
        try:
            write_atomically(self.path, dump_json(note, indent=2) + "\n")
        except OSError as error:
            logger.warning("Writing %s failed: %s", self.path, error)

    def remove(self) -> None:
        """Removes the record of an earlier failure, because the job has results now."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def read(self) -> tuple[int, str] | None:
        """Reads the exit code and the message; `None` if the file is missing. Raises `ConfigError` if it is broken."""
        try:
            note = read_json_object(self.path, max_bytes=8 * MAX_CHARS)
            code, message = note["exit_code"], note["message"]
        except FileNotFoundError:
            return None
        except (OSError, KeyError) as error:
            raise ConfigError(f"{self.path} is broken: {error!r:.200}.") from None
        return (code if code == exit_codes.USAGE else exit_codes.INCOMPLETE), str(message)[:MAX_CHARS]


DEPTH = 4
"""Maximum depth of job folders, because `hydra.sweep.subdir` can name nested folders."""

OF_THE_SUMMARY = ("attempts", "branches", "reward_threshold")
"""Keys that may change when a job is resumed. A complete job runs again after a change, because its summary changes."""


class JobState(StrEnum):
    """The state of a job."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The content of a job's folder.

    Attributes:
        path: Path of the folder.
        summary: Totals of the job's run so far; `None` if no run was started.
        failure: Exit code and message of a rejected or failed job; `None` otherwise.
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
        """The exit code of the job. The exit code of a sweep is at least the exit code of each job."""
        if self.failure is not None:
            return self.failure[0]
        is_well = self.state is JobState.COMPLETE and self.summary is not None and not self.summary.broken
        return exit_codes.COMPLETE if is_well else exit_codes.INCOMPLETE

    def overrides(self) -> Sequence[str]:
        """Returns the overrides that Hydra recorded, if any. Raises `ConfigError` if the record is broken."""
        try:
            found = read_yaml(self.path / HYDRA_RECORDS / "overrides.yaml")
        except OSError:
            return ()
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def is_done(self, config: Mapping[str, Any]) -> bool:
        """Returns whether the job is complete, and does not have to run again with this config."""
        if self.state is not JobState.COMPLETE or config["resume_redo"]:
            return False
        try:
            recorded = recorded_config(self.path)
        except OSError:
            return False
        may_differ = [key for key in KEYS_THAT_MAY_CHANGE if key not in OF_THE_SUMMARY]
        return not any(config_differences(recorded, scrub(config), may_differ=may_differ))


def job_folders(sweep_dir: Path, *, depth: int = DEPTH) -> Iterator[Path]:
    """Yields the folders of a sweep's started jobs, with numbered folders in numeric order."""
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
