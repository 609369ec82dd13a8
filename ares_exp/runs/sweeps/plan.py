"""The list of a sweep's jobs, written before the first job starts, so that jobs that never started are noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_record
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.records.secrets import scrub_argv
from ares_exp.runs.resume.session import RESUME_KEYS
from ares_exp.trackers.metrics import DEFAULT

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
