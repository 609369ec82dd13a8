"""`env=ares`: the presets of the `martian-ares` package as a source of environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

from pydantic import Field, validate_call

from ares_exp.environments.ares.ares_package import container_class, count_tasks, import_ares, response_module
from ares_exp.environments.ares.conversion import response_to_ares
from ares_exp.environments.ares.environment import AresEnvironment
from ares_exp.environments.source import EpisodeParts, Report, SourceBase
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.tasks.selection import parse_position, select

Entry = int | str
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class _PresetTask:
    """A task: the package gives them numbers only."""

    name: str


class AresEnvironments(SourceBase):
    """The tasks of a preset, each under the name by which the package makes it: `preset:5`."""

    needs_container = False  # the package starts its own

    @validate_call
    def __init__(
        self,
        *,
        preset: Annotated[str, Field(min_length=1)],
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        container: Literal["docker", "daytona"] = "docker",
        import_timeout_sec: Seconds = 120.0,
        timeout_sec: Seconds = 3600.0,
    ) -> None:
        """Validates the options.

        Args:
            preset: A preset of the package, if you like with a selector: `20q`, `20q:5`, `20q:0:10`, `20q@2/8`.
            tasks: What of that to play: names (`20q:5`), globs, indexes (`5`), slices (`0:10`), shards (`@2/8`), one or
                a list; `None` for all.
            exclude: Names or globs to leave out.
            limit: At most so many tasks.
            container: Which of the package's own containers: `docker` or `daytona`; the group `container` is not used.
            import_timeout_sec: How long its import may take: it fetches a list of data sets from a hosted registry.
            timeout_sec: Bound on one `reset` or `step` of its environments.
        """
        self._preset = preset
        self._selector = tasks
        self._exclude = exclude
        self._limit = limit
        self._container = container
        self._import_timeout_sec = import_timeout_sec
        self._timeout_sec = timeout_sec
        self._ares: ModuleType | None = None

    @property
    def path(self) -> Path | None:
        """The package's tasks have no place of ours."""
        return None

    def load(self, report: Report) -> Sequence[str]:
        """Imports the package, and applies the selection to the preset's tasks."""
        ares = self._ares = import_ares(self._import_timeout_sec)
        name, position = _parts(self._preset)
        found = [_PresetTask(f"{name}:{index}") for index in range(count_tasks(ares, name))]
        if position:
            try:
                found = parse_position(position)(found)
            except (ValueError, LookupError) as error:
                raise ConfigError(f"`env.preset` {self._preset!r}: {error}.") from None
        chosen = select(
            found, tasks_selector=self._selector, exclude=self._exclude, limit=self._limit, preset=f"ares ({name})"
        )
        return [one.name for one in chosen]

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Refuses nothing."""

    def make(self, task_name: str, parts: EpisodeParts) -> AresEnvironment:
        """Makes the environment of one episode."""
        ares = self._ares
        if ares is None:
            raise PreflightError("load() comes first: it imports martian-ares.")
        return AresEnvironment(
            task_name,
            make=partial(_make, ares, task_name, self._container),
            answer=partial(response_to_ares, module=response_module(ares)),
            timeout_sec=self._timeout_sec,
        )


def _make(ares: ModuleType, task_name: str, container: str) -> object:
    """Makes an environment of the package with that task alone."""
    return ares.make(task_name, container_factory=container_class(ares, container))


def _parts(preset: str) -> tuple[str, str]:
    """Splits a preset into its name, and the selector after it, if there is one."""
    name, mark, shard = preset.partition("@")
    if mark:
        return name, f"@{shard}"
    name, _, position = preset.partition(":")
    return name, position
