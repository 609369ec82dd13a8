"""The jobs of a sweep: the plan that lists them, and the folder of each job, which contains its state and results.

The plan is written before the first job starts, so that jobs that never started are noticed.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.recorded_results import recorded_summary
from ares_exp.records.results import RunSummary
from ares_exp.records.run_dir import (
    HYDRA_RECORDS,
    RunDir,
    dump_json,
    read_json_object,
    read_record,
    read_yaml,
    write_atomically,
)
from ares_exp.records.secrets import MASK, scrub, scrub_argv, typed_secrets
from ares_exp.runs.resume.recorded_run import recorded_config
from ares_exp.runs.resume.session import KEYS_THAT_MAY_CHANGE, RESUME_KEYS, config_differences
from ares_exp.trackers.metrics import DEFAULT

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

PLAN = "plan.json"
MAX_JOBS = 100_000
MAX_BYTES = 64 * 2**20
BASIC_SWEEPER = "BasicSweeper"
"""Class name of Hydra's default sweeper, which creates one job for each combination of values."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The jobs of a sweep, and the metric by which they are compared.

    Attributes:
        count: Number of jobs; 0 if unknown.
        objective: Metric by which jobs are compared.
        minimize: Whether lower values of the metric are better.
        jobs: Overrides of each job with masked secrets, in the order of the job numbers. Empty if the sweeper chooses
            jobs during the sweep, as Optuna's sweeper does.
    """

    count: int = 0
    objective: str = DEFAULT
    minimize: bool = False
    jobs: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Creates the plan of a sweep from the config that Hydra composed for the sweep."""
        sweeper = config.hydra.sweeper
        if sweeper._target_.endswith(BASIC_SWEEPER):
            jobs = _grid(config)
            return cls(len(jobs), config.objective, jobs=jobs)
        minimize = str(sweeper.get("direction") or "").rpartition(".")[2].lower() == "minimize"
        return cls(int(sweeper.get("n_trials") or 0), config.objective, minimize)

    @classmethod
    def read(cls, sweep_dir: Path) -> Self:
        """Reads `plan.json`. Returns an empty plan if it is missing, and raises `ConfigError` if it is invalid."""
        from pydantic import TypeAdapter, ValidationError

        path = sweep_dir / PLAN
        try:
            plan = TypeAdapter(cls).validate_json(read_record(path, max_bytes=MAX_BYTES))
        except FileNotFoundError:
            return cls()
        except (OSError, ValidationError) as error:
            first = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise ConfigError(f"{path} is broken: {first}. Remove it to use the jobs in the folder.") from None
        if not 0 <= plan.count <= MAX_JOBS or len(plan.jobs) not in (0, plan.count):
            raise ConfigError(f"{path} is broken: expected at most {MAX_JOBS:,} jobs, each with its overrides.")
        return plan

    def write(self, sweep_dir: Path) -> None:
        """Writes the plan to `plan.json` in a sweep's folder."""
        write_atomically(sweep_dir / PLAN, dump_json(asdict(self)) + "\n")

    def check_continues(self, earlier: SweepPlan) -> None:
        """Raises `ConfigError` if a job has other values than the job with the same number in an earlier plan.

        Compares only the keys whose values differ between jobs.
        """
        keys = {*varied(self.jobs), *varied(earlier.jobs)}
        for number, (job, now) in enumerate(zip_longest(earlier.jobs, self.jobs, fillvalue=())):
            if earlier.jobs and _chosen(job, keys) != _chosen(now, keys):
                raise ConfigError(
                    f"Expected the same jobs as in the sweep, but its job {number} is "
                    f"`{' '.join(_chosen(job, keys)) or 'none'}`, and the job of this command is "
                    f"`{' '.join(_chosen(now, keys)) or 'none'}`. For other jobs, use another sweep folder."
                )


def varied(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Lists the keys whose values differ between jobs, in order of appearance. Omits keys such as `resume`."""
    given = [{override.partition("=")[0]: override for override in job} for job in jobs]
    keys = dict.fromkeys(key for overrides in given for key in overrides if key not in RESUME_KEYS)
    return [key for key in keys if len({overrides.get(key) for overrides in given}) > 1]


def job_label(sweep_dir: Path, number: int, overrides: Sequence[str]) -> str:
    """Returns a name for a job: its number, and the overrides whose values differ between the jobs of the sweep."""
    jobs = SweepPlan.read(sweep_dir).jobs
    keys = varied(jobs) if jobs else [override.partition("=")[0] for override in overrides]
    return " ".join([f"#{number}", *(unescaped(one) for one in scrub_argv(overrides) if one.partition("=")[0] in keys)])


def unescaped(override: str) -> str:
    """Returns an override as the user typed it, without the backslashes that Hydra's sweeper adds."""
    return re.sub(r"\\([\\(){}\[\]:=, \t])", r"\1", override)


def _chosen(job: Sequence[str], keys: set[str]) -> list[str]:
    return [override for override in job if override.partition("=")[0] in keys]


def _grid(config: DictConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the overrides of the jobs that Hydra's default sweeper creates; empty if it would reject the command."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices: dict[str, list[str]] = {}
    try:
        overrides = parser.parse_overrides([*params, *config.hydra.overrides.task])
    except HydraException:
        return ()
    for one in overrides:
        key = one.get_key_element()
        if one.is_sweep_override() and not one.is_discrete_sweep():
            return ()
        values = one.sweep_string_iterator() if one.is_sweep_override() else [one.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    return tuple(tuple(scrub_argv(job)) for job in product(*choices.values()))


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
