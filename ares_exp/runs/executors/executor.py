"""The base class of executors (config group `executor`), and the executor that runs everything in this process."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ares_exp import __version__
from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.source import EpisodeParts, Report, SourceBase

if TYPE_CHECKING:
    from omegaconf import DictConfig


def versions_here() -> dict[str, str]:
    """Returns the versions of `ares_exp` and Python, which must be the same in a run and its hosts."""
    return {"ares_exp": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe from which another process creates the same environments. It does not include the policy.

    Attributes:
        nodes: Resolved config nodes of the groups `env`, `scorer`, `agent` and `container`.
        cwd: Working directory of the run, which is the base of relative paths.
        search_path: Python module search path, which also contains the user's own components.
        versions: Versions of the run's software, by name.
    """

    nodes: Mapping[str, Any]
    cwd: Path
    search_path: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=versions_here)

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Creates the recipe from a composed config."""
        from omegaconf import OmegaConf

        resolved: Any = OmegaConf.to_container(config, resolve=True)
        nodes = {group: resolved[group] for group in ("env", "scorer", "agent", "container")}
        return cls(nodes, Path.cwd(), tuple(str(Path(entry or ".").absolute()) for entry in sys.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The facts about a run that its executor needs.

    Attributes:
        source: Loaded task set.
        task_names: Names of the selected tasks.
        parts: Arguments of environments that are the same for all episodes of the run.
        recipe: Recipe from which other processes create the same environments; `None` if some components were passed as
            Python objects.
        needs_shared_disk: Reason why all nodes must be able to access the run directory; `None` if they need not.
        run_dir: Run directory; `None` if nothing is recorded.
    """

    source: SourceBase
    task_names: Sequence[str]
    parts: EpisodeParts
    recipe: Recipe | None = None
    needs_shared_disk: str | None = None
    run_dir: Path | None = None


Place: TypeAlias = Callable[[SourceBase, str, EpisodeParts], MinimalEnvironment]
"""A place for one environment, in this process or on a host. Calling it creates the environment without starting it."""


def make_here(source: SourceBase, task_name: str, parts: EpisodeParts) -> MinimalEnvironment:
    """Creates the environment of an episode in this process."""
    return source.make(task_name, parts)


class Executor:
    """The base class of executors, which run environments in this process or in other processes.

    All other parts of the run, such as the policy, stay in the run's own process.
    """

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns preflight checks, which can raise `PreflightError`. They run while the tasks are being read."""
        raise NotImplementedError

    async def open(self, ran: RunPlan, report: Report) -> None:
        """Prepares the executor. Raises `UserError` if the executor cannot run the tasks."""
        raise NotImplementedError

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Waits until there is room for one more environment, and reserves this place during the block.

        `losses` is the number of hosts that were lost while they ran an episode of this attempt.
        """
        raise NotImplementedError

    def figures(self) -> Mapping[str, float]:
        """Returns the metrics of the executor, by name (`system/…`). By default, there are no metrics."""
        return {}

    async def close(self) -> None:
        """Releases all resources. Idempotent. By default, does nothing."""


class LocalExecutor(Executor):
    """Runs environments in this process, on its event loop, without a limit on their number."""

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns the checks of the container backend and of the agent, if tasks need a container."""
        if not source.needs_container:
            return ()
        return parts.container_factory.preflight(), parts.code_agent_factory.preflight()

    async def open(self, ran: RunPlan, report: Report) -> None:
        """Checks that the run's components can run the tasks."""
        await asyncio.to_thread(ran.source.check, ran.parts, report=report)

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Reserves a place without waiting, because the number of environments is not limited."""
        return nullcontext(make_here)
