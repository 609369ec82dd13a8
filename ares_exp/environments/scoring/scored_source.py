"""The scored source: any environment source, whose environments have their episodes scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.config.parts import StandIn
from ares_exp.environment import Environment
from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.scoring.configured_scorers import make_scoring_rules
from ares_exp.environments.scoring.scoring_environment import ScoringEnvironment, ScoringRules
from ares_exp.environments.source import EpisodeParts, Report, SourceBase, make_source
from ares_exp.tasks.task_contract import Task, TaskOrigin

if TYPE_CHECKING:
    from omegaconf import DictConfig


class ScoredSource(StandIn, SourceBase):
    """Plays what another source plays, each episode scored at its end. It opens and closes the scorers, too."""

    def __init__(self, source: SourceBase, rules: ScoringRules) -> None:
        """Keeps the arguments.

        Args:
            source: Makes the environments.
            rules: The scorers and their weights.
        """
        super().__init__(source)
        self._source = source
        self._rules = rules

    @property
    def path(self) -> Path | None:
        """As of the source, like every member but `make`, `preflight` and `close`."""
        return self._source.path

    def load(self, report: Report) -> Sequence[str]:  # noqa: D102
        return self._source.load(report)

    def check(self, parts: EpisodeParts, *, report: Report) -> None:  # noqa: D102
        self._source.check(parts, report=report)

    def make(self, task_name: str, parts: EpisodeParts) -> Environment:
        """Makes the environment of one episode, which is scored at its end."""
        return ScoringEnvironment(self._source.make(task_name, parts), self._rules, parts, task_name=task_name)

    @property
    def needs_container(self) -> bool:  # noqa: D102
        return self._source.needs_container

    @property
    def exports_state(self) -> bool:  # noqa: D102
        return self._source.exports_state

    @property
    def has_solutions(self) -> bool:  # noqa: D102
        return self._source.has_solutions

    @property
    def loads_offline(self) -> bool:  # noqa: D102
        return self._source.loads_offline

    @property
    def tasks(self) -> Sequence[Task]:  # noqa: D102
        return self._source.tasks

    @property
    def origins(self) -> Mapping[str, TaskOrigin]:  # noqa: D102
        return self._source.origins

    @property
    def spenders(self) -> Sequence[str]:
        """What the source names, and the scorers that ask models."""
        asking = [f"the judge `{one.name}`" for one in self._rules.scorers if one.scorer.asks_model]
        return [*self._source.spenders, *asking]

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """Those of the source, then those of the scorers."""
        return [*self._source.own_models, *(model for one in self._rules.scorers for model in one.scorer.own_models)]

    def digest(self, task_name: str) -> str | None:  # noqa: D102
        return self._source.digest(task_name)

    def keep(self, task_names: Sequence[str]) -> None:  # noqa: D102
        self._source.keep(task_names)

    async def preflight(self) -> None:
        """Checks the source, and that every scorer is ready. Raises `PreflightError` as they do."""
        await self._source.preflight()
        for one in self._rules.scorers:
            await one.scorer.preflight()

    async def close(self) -> None:
        """Closes the scorers and the source. Idempotent."""
        try:
            for one in self._rules.scorers:
                await one.scorer.close()
        finally:
            await self._source.close()


def make_scored_source(config: DictConfig) -> SourceBase:
    """Makes the source that the option of `env` describes, with the scorers of `env.scorers`, if there are any.

    Raises:
        ConfigError: It, or a scorer, cannot be made.
    """
    source, rules = make_source(config), make_scoring_rules(config)
    return ScoredSource(source, rules) if rules.scorers else source
