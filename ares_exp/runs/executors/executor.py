"""The contract of an executor, which an option of the `executor` group makes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from ares_exp.config.parts import completed
from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.source import EpisodeParts, Report, SourceBase

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """What another process makes the same environments from. No policy of the run is in it.

    Attributes:
        nodes: The resolved nodes of `env`, `scorer`, `agent` and `container`.
        cwd: The working directory, which relative paths start at.
        search_path: Where modules are looked for, for parts of the user's own.
    """

    nodes: Mapping[str, Any]
    cwd: Path
    search_path: tuple[str, ...]

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Takes the recipe out of a composed config."""
        from omegaconf import OmegaConf

        resolved: Any = OmegaConf.to_container(config, resolve=True)
        nodes = {group: resolved[group] for group in ("env", "scorer", "agent", "container")}
        return cls(nodes, Path.cwd(), tuple(str(Path(entry or ".").absolute()) for entry in sys.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run is going to run.

    Attributes:
        source: Its task set, loaded.
        task_names: The selected tasks.
        parts: The parts of any of its episodes.
        recipe: What other processes make environments from; `None` where parts were given as objects.
        needs_shared_disk: Why nodes must see the run directory, in words; `None` when they need not.
        run_dir: The run directory; `None` when nothing is kept.
    """

    source: SourceBase
    task_names: Sequence[str]
    parts: EpisodeParts
    recipe: Recipe | None = None
    needs_shared_disk: str | None = None
    run_dir: Path | None = None


class Place(Protocol):
    """A place for one environment, held while its episode is run."""

    def make(self, source: SourceBase, task_name: str, parts: EpisodeParts) -> MinimalEnvironment:
        """Makes the environment of an episode there. Starts nothing."""
        ...


class Executor(Protocol):
    """Where the environments of a run live. Everything else stays in the run's own process.

    What else can be asked of an executor is `ExecutorBase`.
    """

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns what can be checked while the tasks are read. Each raises `PreflightError`."""
        ...

    async def open(self, ran: RunPlan, report: Report) -> None:
        """Checks that the tasks can be run there, and makes ready for them.

        Raises:
            UserError: They cannot.
        """
        ...

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Waits for a place, which is held inside the block.

        Args:
            task_name: The task of the environment.
            losses: How often the attempt was lost with the host that it was continued.
        """
        ...


class ExecutorBase(Executor):
    """Everything that is asked of an executor. What an `Executor` need not have has its default here."""

    def figures(self) -> Mapping[str, float]:
        """Returns its metrics, by name (`system/…`). Default: none."""
        return {}

    async def close(self) -> None:
        """Releases what it holds. Idempotent. Default: nothing."""


def as_executor(executor: Executor) -> ExecutorBase:
    """Returns `executor` with the defaults of `ExecutorBase` for what it lacks."""
    return completed(executor, ExecutorBase)


class LocalExecutor(ExecutorBase):
    """Has environments live in this process, on its event loop: as many as asked for."""

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns the checks of the container backend and of the agent, where they are needed."""
        if not source.needs_container:
            return ()
        return parts.container_factory.preflight(), parts.code_agent_factory.preflight()

    async def open(self, ran: RunPlan, report: Report) -> None:
        """Has the source check its tasks. Raises `UserError` when they cannot be run."""
        await asyncio.to_thread(ran.source.check, ran.parts, report=report)

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Gives a place at once."""
        return nullcontext(self)

    def make(self, source: SourceBase, task_name: str, parts: EpisodeParts) -> MinimalEnvironment:
        """Makes the environment of an episode."""
        return source.make(task_name, parts)
