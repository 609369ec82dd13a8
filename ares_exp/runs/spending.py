"""The budget guard of a run: counts what is spent, and ends the run when a budget is exhausted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from ares_exp.errors import BudgetExhaustedError, ConfigError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EpisodeResult
from ares_exp.runs.budget import Budget, BudgetMeter, Spent
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.resume.previous_sessions import PreviousSessions
from ares_exp.runs.running_episode import RunningEpisode

INTERVAL_SEC = 2.0
"""Seconds between two checks of the budgets while nothing is paid for."""


class Spending:
    """Counts responses, environments and rows towards the budgets of a run and its sweep.

    Attributes:
        budget: The budget in force.
        is_limited: Whether anything limits tokens or cost, of the run or of an episode.
    """

    def __init__(
        self,
        parts: Components,
        settings: Settings,
        *,
        running: Callable[[], Iterable[RunningEpisode]],
        end: Callable[[BudgetExhaustedError], None],
        warn: Callable[[str], None],
    ) -> None:
        """Counts nothing yet.

        Args:
            parts: The components of the run.
            settings: Its settings.
            running: Returns the running episodes.
            end: Ends the run. May be called more than once.
            warn: Warns the user once of a sentence.
        """
        self._parts = parts
        self._settings = settings
        self._running = running
        self._end = end
        self._warn = warn
        self._use(parts.budget)

    def _use(self, budget: Budget) -> None:
        limits, sweep = self._settings.limits, budget.sweep
        self.budget = budget
        self._limits_cost = any(bound is not None for bound in (limits.cost, budget.cost, sweep.cost))
        self.is_limited = self._limits_cost or any(
            bound is not None for bound in (limits.tokens, budget.tokens, sweep.tokens)
        )

    def start(self, earlier: PreviousSessions, run_dir: Path) -> None:
        """Starts to count, with what earlier sessions and the other jobs of the sweep have spent. Blocking."""
        self._meter = BudgetMeter(
            self.budget,
            earlier=earlier.results,
            earlier_wall_sec=earlier.wall_sec,
            run_dir=run_dir,
            sweep_dir=self._settings.sweep_dir,
        )
        self._asks_models = bool(self._parts.source.own_models)
        self._refresh()

    @property
    def spent(self) -> Spent:
        """Total spent by the run so far, over all its sessions."""
        return self._meter.spent

    def set(self, budget: Budget) -> None:
        """Replaces the budget, and ends the run if the new one is exhausted."""
        self._use(budget)
        self._meter.replace(budget)
        self.check()

    def pay(self, episode: RunningEpisode, response: LLMResponse) -> None:
        """Counts a response of the policy, and what models of the environment have cost meanwhile."""
        self._meter.add_answer(episode.planned.episode_id, response)
        if self._limits_cost:
            for model in tuple(self._parts.policy.unpriced):
                self._warn(
                    f"No price is known for model {model!r}: its cost counts as 0.0, so that the limit on cost does "
                    "not hold. Set policy.prices (0 for a free model)."
                )
        if self._asks_models:
            self._count_environments([episode])
        self.check()

    def add(self, result: EpisodeResult) -> None:
        """Counts an episode that has ended."""
        self._meter.add(result)
        self.check()

    def check(self) -> None:
        """Ends the run when a budget is exhausted; running episodes can be resumed later."""
        if (why := self._meter.exhausted()) is not None:
            self._end(BudgetExhaustedError(why))

    async def watch(self) -> None:
        """Checks the budgets at intervals: time passes, and environments and other jobs of the sweep spend."""
        while True:
            await asyncio.sleep(INTERVAL_SEC)
            await asyncio.to_thread(self._refresh)
            self._count_environments(self._running())
            self.check()

    def _count_environments(self, running: Iterable[RunningEpisode]) -> None:
        for episode in running:
            if episode.result is None:
                self._meter.add_environment(episode.planned.episode_id, episode.report().environment_usage)

    def _refresh(self) -> None:
        """Reads the other jobs' spending. Keeps the last values of unreadable jobs and warns once. Blocking."""
        try:
            self._meter.refresh()
        except (ConfigError, OSError) as error:
            self._warn(f"What the jobs of the sweep have spent cannot be read, and does not count: {error}")
