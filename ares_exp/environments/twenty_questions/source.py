"""The source of `env=twenty_questions`, with the objects to guess and the oracle of all games."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.source import EpisodeParts, Report, SelectingSource
from ares_exp.environments.twenty_questions.environment import TwentyQuestionsEnvironment
from ares_exp.environments.twenty_questions.game_oracle import FactsOracle, HiddenObject, load_objects, oracle_model

Entry = int | str


class TwentyQuestionsEnvironments(SelectingSource[HiddenObject]):
    """A source with one task (a game) per object. All games share one oracle."""

    needs_container = False
    has_solutions = True
    loads_offline = True

    @validate_call
    def __init__(
        self,
        *,
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        questions: Annotated[int, Field(ge=1)] = 20,
        oracle: Any = None,
        oracle_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0,
    ) -> None:
        """Validates the options.

        Args:
            tasks: Tasks to run: a name, glob, index (`5`), slice (`0:10`) or shard (`@2/8`), or a list of these; `None`
                for all tasks.
            exclude: Names or globs of tasks to leave out.
            limit: Maximum number of tasks.
            questions: Number of replies that the policy has in a game: questions, guesses and unusable replies.
            oracle: A policy or any `LLMClient`; `None` for an oracle that uses bundled facts instead of a model.
            oracle_timeout_sec: Time limit in seconds of one question to the oracle, including retries.

        Raises:
            ConfigError: The oracle cannot answer questions.
        """
        super().__init__("twenty_questions", tasks=tasks, exclude=exclude, limit=limit)
        self._questions = questions
        self._answers_by_facts = oracle is None
        self._oracle = oracle_model(FactsOracle() if oracle is None else oracle, timeout_sec=oracle_timeout_sec)

    @property
    def path(self) -> Path | None:
        """`None`, because the objects are part of the package."""
        return None

    def load(self, report: Report) -> Sequence[str]:
        """Reads the bundled objects and selects tasks."""
        objects = load_objects()
        if self._answers_by_facts:
            self._oracle.policy = FactsOracle(objects)
        return self._hold(self._choose(objects))

    async def preflight(self) -> None:
        """Checks that the oracle is ready.

        Raises:
            PreflightError: The model of the oracle is not ready.
        """
        await self._oracle.open()

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """Accepts all parts, because a game needs no container and no code agent."""

    def digest(self, task_name: str) -> str:
        """Returns a digest of the object."""
        return self._selected[task_name].digest

    def make(self, task_name: str, parts: EpisodeParts) -> TwentyQuestionsEnvironment:
        """Creates the environment of one episode."""
        return TwentyQuestionsEnvironment(
            [self._selected[task_name]],
            oracle=self._oracle,
            questions=min(self._questions, parts.limits.steps or self._questions),
            verify_on_truncation=parts.limits.verify_on_truncation,
            seed=parts.seed,
            provide_solution=parts.provide_solution,
            output_dir=parts.output_dir,
        )

    @property
    def spenders(self) -> Sequence[str]:
        """Names the oracle if it is a model; otherwise empty."""
        return () if self._answers_by_facts else ("the oracle",)

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """The oracle of all games."""
        return (self._oracle,)

    async def close(self) -> None:
        """Closes the oracle. Idempotent."""
        await self._oracle.close()
