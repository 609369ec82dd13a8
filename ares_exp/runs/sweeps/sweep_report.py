"""The summary of a sweep: a row for each job, and the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.records.statistics.metric_estimates import metrics
from ares_exp.records.statistics.run_statistics import RunStatistics, json_ready
from ares_exp.runs.sweeps.job_folder import JobFolder, JobState, job_folders
from ares_exp.runs.sweeps.objective import PREFIX
from ares_exp.runs.sweeps.plan import SweepPlan, varied

SWEEP_JSON = "sweep.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One job in the summary.

    Attributes:
        job: Its folder, from the sweep's.
        overrides: What was typed for it and not for all jobs, by key; secrets masked.
        state: Its state.
        planned: Number of planned attempts.
        finished: Number of ended attempts, without those that were cut short (`cancelled`, `lost`).
        outcomes: Number of attempts by outcome.
        objective: The metric by which the jobs are compared; `None` where it has none.
        low, high: Its interval, where the metric has one.
        mean_reward: Mean reward, errors counted as zero.
        tokens, cost: Sums over all tries, cost in US dollars.
        message: The reason why it failed.
    """

    job: str
    overrides: Mapping[str, str]
    state: JobState
    planned: int = 0
    finished: int = 0
    outcomes: Mapping[str, int] | None = None
    objective: float | None = None
    low: float | None = None
    high: float | None = None
    mean_reward: float | None = None
    tokens: int = 0
    cost: float = 0.0
    message: str | None = None


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A sweep's folder, added up.

    Attributes:
        path: The folder.
        plan: What the sweep was to consist of.
        rows: One for each job, those that have not started included.
        exit_code: What the command that played the sweep exits with, unless it was interrupted.
    """

    path: Path
    plan: SweepPlan
    rows: tuple[Row, ...]
    exit_code: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the summary of a sweep that runs, has ended or was killed.

        Raises:
            ConfigError: It is no sweep's folder, or a record in it is broken.
        """
        plan = SweepPlan.read(path)
        folders = {str(folder.relative_to(path)): JobFolder.read(folder) for folder in job_folders(path)}
        if not folders and not plan.count:
            raise ConfigError(f"Expected the folder of a sweep, found no job and no plan of jobs in {path}.")
        missing = [name for name in map(str, range(plan.count)) if name not in folders][: plan.count - len(folders)]
        names = sorted([*folders, *missing], key=lambda name: (int(name) if name.isdecimal() else 0, name))
        overrides = {
            name: plan.jobs[int(name)]
            if name.isdecimal() and int(name) < len(plan.jobs)
            else (folders[name].overrides() if name in folders else ())
            for name in names
        }
        keys = varied([jobs for jobs in overrides.values() if jobs])
        jobs = [folders.get(name, JobFolder(path / name)) for name in names]
        rows = tuple(
            _row(name, job, _chosen(overrides[name], keys), plan.objective)
            for name, job in zip(names, jobs, strict=True)
        )
        return cls(path, plan, rows, max((job.exit_code for job in jobs), default=exit_codes.COMPLETE))

    @property
    def has_started(self) -> bool:
        """Whether any job left something."""
        return any(row.state is not JobState.NOT_STARTED for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The complete job with the best objective; if none is complete, the best of all; `None` without any."""
        rated = [row for row in self.rows if row.objective is not None]
        complete = [row for row in rated if row.state is JobState.COMPLETE]
        sign = -1 if self.plan.minimize else 1
        return max(complete or rated, key=lambda row: sign * (row.objective or 0.0), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
        best = self.best
        found: dict[str, Any] = json_ready(
            {
                "schema_version": SCHEMA_VERSION,
                "objective": self.plan.objective,
                "minimize": self.plan.minimize,
                "best": best.job if best is not None else None,
                "jobs": [asdict(row) for row in self.rows],
            }
        )
        return found

    def write(self) -> None:
        """Writes `sweep.json`."""
        write_atomically(self.path / SWEEP_JSON, dump_json(self.to_dict(), indent=2) + "\n")


def _chosen(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    return {key: given[key] for key in keys if key in given}


def _row(name: str, job: JobFolder, overrides: Mapping[str, str], objective: str) -> Row:
    message = job.failure[1] if job.failure is not None else None
    summary = job.summary
    if summary is None:
        return Row(name, overrides, job.state, message=message)
    ended = summary.finished
    found = metrics(RunStatistics.of(ended, planned=summary.planned, threshold=summary.threshold))
    paid = summary.paid()
    return Row(
        name,
        overrides,
        job.state,
        planned=summary.planned,
        finished=len(ended),
        outcomes=summary.count(),
        objective=found.get(PREFIX + objective),
        low=found.get(f"{PREFIX}{objective}_low"),
        high=found.get(f"{PREFIX}{objective}_high"),
        mean_reward=found.get(f"{PREFIX}mean_reward"),
        tokens=int(paid["prompt_tokens"] + paid["generated_tokens"]),
        cost=paid["cost"],
        message=message,
    )
