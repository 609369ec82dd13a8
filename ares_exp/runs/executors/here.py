"""`executor=local`: environments in the run's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.source import EpisodeParts, Report, SourceBase
from ares_exp.runs.executors.executor import ExecutorBase, Place, Played


class LocalExecutor(ExecutorBase):
    """Has environments live in this process, on its event loop: as many as asked for."""

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns the checks of the container backend and of the agent, where they are needed."""
        if not source.needs_container:
            return ()
        return parts.container_factory.preflight(), parts.code_agent_factory.preflight()

    async def open(self, played: Played, report: Report) -> None:
        """Has the source check its tasks. Raises `UserError` when they cannot be played."""
        await asyncio.to_thread(played.source.check, played.parts, report=report)

    def room(self, task_name: str, *, losses: int = 0) -> AbstractAsyncContextManager[Place]:
        """Gives a place at once."""
        return nullcontext(self)

    def make(self, source: SourceBase, task_name: str, parts: EpisodeParts) -> MinimalEnvironment:
        """Makes the environment of an episode."""
        return source.make(task_name, parts)
