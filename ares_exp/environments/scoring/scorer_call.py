"""The call of one scorer: bounded in time, off the event loop if it is not async, its failure typed and named."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ares_exp.containers.container import Container
from ares_exp.environments.scoring.scorer import ScoredEpisode, ScorerBase, as_scorer
from ares_exp.environments.scoring.scores import Score, checked_score
from ares_exp.errors import ContainerError, ScorerError, ScorerTimeoutError


@dataclass(frozen=True, slots=True)
class ConfiguredScorer:
    """A scorer with its place in a run.

    Attributes:
        name: Its name, which its rewards are recorded under.
        part: What is called.
        weight: Its weight in the episode's reward; 0: recorded only.
        timeout_sec: Bound on one call in seconds.
    """

    name: str
    part: Any
    weight: float = 1.0
    timeout_sec: float = 600.0

    @property
    def scorer(self) -> ScorerBase:
        """The part, with the defaults for what it lacks."""
        return as_scorer(self.part)

    async def score(self, episode: ScoredEpisode, container: Container | None) -> Score:
        """Calls the scorer.

        Raises:
            ScorerError: It raised, took too long, or returned no reward; the message names it.
            ContainerError: The container failed while it was used.
        """
        limit = asyncio.timeout(self.timeout_sec)
        try:
            async with limit:
                returned = await _called(self.part, episode, container)
            return checked_score(self.name, self.weight, returned)
        except (ScorerError, ContainerError):
            raise
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise ScorerTimeoutError(
                    f"The scorer `{self.name}` did not return within its limit of {self.timeout_sec:g} s "
                    "(`timeout_sec` of the scorer).",
                    scorer=self.name,
                ) from error
            raise ScorerError(
                f"The scorer `{self.name}` raised {type(error).__name__}: {error}", scorer=self.name
            ) from error


async def _called(part: Any, episode: ScoredEpisode, container: Container | None) -> Any:
    if _is_async(part):
        return await part(episode, container)
    returned = await _in_daemon_thread(lambda: part(episode, container))
    return await returned if inspect.isawaitable(returned) else returned


def _is_async(part: Any) -> bool:
    while isinstance(part, functools.partial):
        part = part.func
    return inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(type(part).__call__)


async def _in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Runs `function` in a thread that does not outlive the process: one that hangs is left behind."""
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(function())
            except BaseException as error:  # an exit, too: it is this scorer's failure
                outcome.set_exception(error)

    threading.Thread(target=work, name="scorer", daemon=True).start()
    return await asyncio.wrap_future(outcome)
