"""The `EnvironmentSource` protocol: what an option of the `env` group is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.config import instantiate_group
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.environment import Environment
from ares_exp.environments.episode_limits import EpisodeLimits

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.environments.restoring import Continuation


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """What an environment of one episode is made from.

    Attributes:
        container_factory: Makes its container.
        code_agent_factory: Makes its code agent.
        limits: When it is truncated.
        seed: Seed of the episode.
        provide_solution: Whether the task's solution goes into the container (the oracle).
        output_dir: Where files of the episode are kept (`verifier/`, `artifacts/`), or `None`.
        start_from: Where the episode goes on, instead of beginning; only for a source with `exports_state`.
    """

    container_factory: ContainerFactory
    code_agent_factory: CodeAgentFactory
    limits: EpisodeLimits
    seed: int
    provide_solution: bool = False
    output_dir: Path | None = None
    start_from: Continuation | None = None


Report = Callable[[str], None]
"""Takes a sentence that warns the user of something that does not stop the run."""


class EnvironmentSource(Protocol):
    """A task set, and the environments that play its tasks.

    A source whose environments have `export_state` (and `step_count`) says so by `exports_state = True`; others are
    refused with `snapshot=…`. One whose environments need neither container nor code agent says
    `needs_container = False`; these are not checked then. One that holds something of its own may have
    `async def preflight()`, which raises a `PreflightError`, and `async def close()`. One whose `load` reads nothing
    but local files says `loads_offline = True`; others are not loaded for the sake of counting their tasks. One that
    can leave out tasks after `load` has `def keep(task_names)`; others are checked for all their tasks, also where
    some of them are played. One that has more to tell of its tasks has them as `tasks`, each a `Task`;
    one that fetched some from git repositories has their `TaskOrigin`s by name as `origins`, for the run's provenance.

    One whose environments ask models of their own may have, each for a thread: `def take_over(earlier, own)`, which has
    a try told what its earlier try, whose answers it goes on with, was told by these models (both are directories of an
    episode's files); and `def recorded_usage(files)`, the `EnvironmentUsage` that is recorded of an episode whose
    process died. What one that lives has spent so far is its `environment_usage`.
    """

    @property
    def path(self) -> Path | None:
        """Where the task set lies, for its provenance; `None` when it has no place."""
        ...

    def load(self, report: Report) -> Sequence[str]:
        """Reads the task set and applies the selection.

        Returns:
            Names of the selected tasks, in order.

        Raises:
            UserError: Nothing there, malformed, or nothing selected.
        """
        ...

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Refuses, before anything starts, what cannot be played with these parts.

        Raises:
            UserError: One message that names every task and reason.
        """
        ...

    def make(self, task_name: str, parts: EpisodeParts) -> Environment:
        """The environment of one episode of `task_name`."""
        ...


def make_source(config: DictConfig) -> EnvironmentSource:
    """The source that the option of `env` makes.

    Raises:
        ConfigError: It cannot be made, or is no source.
    """
    source: EnvironmentSource = instantiate_group(config, "env")
    return source
