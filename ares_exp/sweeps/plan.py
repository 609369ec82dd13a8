"""Which jobs a sweep consists of, written down before the first one begins: else nobody could tell what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ares_exp.derived_command import RESUME_KEYS
from ares_exp.errors import ConfigError
from ares_exp.run_dir import dump_json, open_regular, write_atomically
from ares_exp.secrets import scrub_argv
from ares_exp.sweeps.objective import DEFAULT

if TYPE_CHECKING:
    from omegaconf import DictConfig

PLAN = "plan.json"
MAX_JOBS = 100_000
MAX_BYTES = 64 * 2**20
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The jobs of a sweep.

    Attributes:
        count: How many; 0 where that is not known.
        objective: The metric that tells how good a job is.
        minimize: Whether little of it is good.
        jobs: The overrides of each, secrets masked, in the order of their numbers; empty where a sweeper decides as it
            goes, as Optuna's does.
    """

    count: int = 0
    objective: str = DEFAULT
    minimize: bool = False
    jobs: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """The plan of the sweep that this config, composed for a sweep, makes."""
        sweeper = config.hydra.sweeper
        if sweeper._target_ == BASIC_SWEEPER:
            jobs = _grid(config)
            return cls(len(jobs), config.objective, jobs=jobs)
        minimize = str(sweeper.get("direction") or "").rpartition(".")[2].lower() == "minimize"
        return cls(int(sweeper.get("n_trials") or 0), config.objective, minimize)

    @classmethod
    def read(cls, sweep_dir: Path) -> Self:
        """What a sweep's folder holds; an empty plan where it holds none.

        Raises:
            ConfigError: It cannot be read.
        """
        from pydantic import TypeAdapter, ValidationError

        path = sweep_dir / PLAN
        try:
            with open_regular(path) as file:
                data = json.loads(file.read(MAX_BYTES))
            plan = TypeAdapter(cls).validate_python(data)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            first = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise ConfigError(
                f"{path} is broken: {first}. Without it the folder is read as it is: remove it."
            ) from None
        if not 0 <= plan.count <= MAX_JOBS or len(plan.jobs) not in (0, plan.count):
            raise ConfigError(f"{path} is broken: expected at most {MAX_JOBS:,} jobs, each with its overrides.")
        return plan

    def write(self, sweep_dir: Path) -> None:
        """Writes it down."""
        write_atomically(sweep_dir / PLAN, dump_json(asdict(self)) + "\n")

    def check_continues(self, earlier: SweepPlan) -> None:
        """Checks that the jobs are those of an earlier plan, in what varied there and varies here.

        Raises:
            ConfigError: One of them is another job.
        """
        keys = {*varied(self.jobs), *varied(earlier.jobs)}
        for number, (job, now) in enumerate(zip_longest(earlier.jobs, self.jobs, fillvalue=())):
            if earlier.jobs and _chosen(job, keys) != _chosen(now, keys):
                raise ConfigError(
                    f"Expected the jobs of the sweep that is to be resumed, but its job {number} is "
                    f"`{' '.join(_chosen(job, keys)) or 'none'}`, and this command's is "
                    f"`{' '.join(_chosen(now, keys)) or 'none'}`. Other jobs need a sweep folder of their own."
                )


def varied(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys whose values are not the same in all jobs, in the order in which they are given; of `resume` none."""
    values: dict[str, set[str | None]] = {}
    for job in jobs:
        for override in job:
            if (key := override.partition("=")[0]) not in RESUME_KEYS:
                values.setdefault(key, set())
    for job in jobs:
        given = {override.partition("=")[0]: override for override in job}
        for key, seen in values.items():
            seen.add(given.get(key))
    return [key for key, seen in values.items() if len(seen) > 1]


def _chosen(job: Sequence[str], keys: set[str]) -> list[str]:
    return [override for override in job if override.partition("=")[0] in keys]


def _grid(config: DictConfig) -> tuple[tuple[str, ...], ...]:
    """What Hydra's own sweeper will make of the command; nothing where it will refuse it, and say why itself."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    with suppress(HydraException):
        overrides = parser.parse_overrides([*params, *config.hydra.overrides.task])
        [jobs] = BasicSweeper.split_arguments(overrides, None)
        return tuple(tuple(scrub_argv(job)) for job in jobs)
    return ()
