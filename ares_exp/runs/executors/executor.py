"""The contract of executors, which are the options of the group `executor`, and the executor for one machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.source import EpisodeParts, Report, SourceBase

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that another process uses to create the same environments, without the policy.

    Attributes:
        nodes: Resolved nodes of `env`, `scorer`, `agent` and `container`.
        cwd: Working directory, which is the base of relative paths.
        search_path: Module search path, which includes the user's own parts.
    """

    nodes: Mapping[str, Any]
    cwd: Path
    search_path: tuple[str, ...]

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
        parts: Parts that all episodes of the run have in common.
        recipe: Recipe that other processes use to create environments; `None` if parts were passed as objects.
        needs_shared_disk: Reason why nodes need access to the run directory; `None` if they do not need it.
        run_dir: Run directory; `None` if nothing is recorded.
    """

    source: SourceBase
    task_names: Sequence[str]
    parts: EpisodeParts
    recipe: Recipe | None = None
    needs_shared_disk: str | None = None
    run_dir: Path | None = None


Place: TypeAlias = Callable[[SourceBase, str, EpisodeParts], MinimalEnvironment]
"""A reserved place in this process or on a host. A call creates, but does not start, an environment in this place."""


def make_here(source: SourceBase, task_name: str, parts: EpisodeParts) -> MinimalEnvironment:
    """Creates the environment of an episode in this process."""
    return source.make(task_name, parts)


class Executor:
    """Runs the environments of a run, possibly in other processes. All other parts stay in the run's own process."""

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns the executor's preflight checks, which run while the tasks are read. They raise `PreflightError`."""
        raise NotImplementedError

    async def open(self, ran: RunPlan, report: Report) -> None:
        """Checks that the executor can run the tasks, and prepares the executor.

        Raises:
            UserError: The executor cannot run the tasks.
        """
        raise NotImplementedError

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Waits for a place for an environment, and reserves the place during the block.

        Args:
            task_name: Name of the environment's task.
            losses: Number of hosts that were lost while they ran this attempt.
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
        """Checks that the parts can run the tasks."""
        await asyncio.to_thread(ran.source.check, ran.parts, report=report)

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Returns a place immediately."""
        return nullcontext(make_here)
