"""`env=twenty_questions`: environments that play twenty questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

from ares_exp.environments.source import EpisodeParts, Report
from ares_exp.environments.twenty_questions.environment import TwentyQuestionsEnvironment
from ares_exp.environments.twenty_questions.facts_oracle import FactsOracle
from ares_exp.environments.twenty_questions.objects import HiddenObject, load_objects
from ares_exp.environments.twenty_questions.oracle import Oracle
from ares_exp.environments.twenty_questions.oracle_record import OracleRecord
from ares_exp.results import EnvironmentUsage
from ares_exp.tasks.selection import select

Entry = int | str


class TwentyQuestionsEnvironments:
    """Objects to be guessed, each of them a task, and the oracle that all their games share."""

    needs_container = False
    loads_offline = True

    @validate_call
    def __init__(
        self,
        *,
        objects: Path | None = None,
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        questions: Annotated[int, Field(ge=1)] = 20,
        oracle: Any = None,
        oracle_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0,
    ) -> None:
        """Validates the options; reads and asks nothing yet.

        Args:
            objects: A file of objects (see `load_objects`); `None` for the bundled ones.
            tasks: What to play: names, globs, indexes (`5`), slices (`0:10`), shards (`@2/8`); `None` for all.
            exclude: Names or globs to leave out.
            limit: At most so many.
            questions: Replies that the policy has in a game.
            oracle: What answers, a policy or any `LLMClient`; `None`: by the facts of the objects, without a model.
            oracle_timeout_sec: Bound on one answer of the oracle in seconds, with everything that is tried for it.

        Raises:
            ConfigError: The oracle cannot answer questions.
        """
        self._path = objects
        self._selector = tasks
        self._exclude = exclude
        self._limit = limit
        self._questions = questions
        self._answers_by_facts = oracle is None
        self._oracle = Oracle(FactsOracle() if oracle is None else oracle, timeout_sec=oracle_timeout_sec)
        self._timeout_sec = oracle_timeout_sec
        self._objects: dict[str, HiddenObject] = {}

    @property
    def path(self) -> Path | None:
        """The file of objects; `None` for the bundled ones."""
        return self._path

    def load(self, report: Report) -> Sequence[str]:
        """Reads the objects and applies the selection."""
        found = load_objects(self._path)
        chosen = select(
            found.objects,
            tasks_selector=self._selector,
            exclude=self._exclude,
            limit=self._limit,
            preset="twenty_questions",
        )
        self._objects = {one.name: one for one in chosen}
        if self._answers_by_facts:
            self._oracle = Oracle(FactsOracle(found.vocabulary), timeout_sec=self._timeout_sec)
            if without := [one.name for one in chosen if not one.facts]:
                report(
                    f"{len(without)} of {len(chosen)} objects have no facts ({', '.join(without[:5])}): of them an "
                    "oracle without a model can say little but “I don't know”. Set `policy@env.oracle=chat_completions "
                    "env.oracle.model=…`, or write facts into `env.objects`."
                )
        return list(self._objects)

    def keep(self, task_names: Iterable[str]) -> None:
        """Leaves out the other objects that `load` selected."""
        self._objects = {name: self._objects[name] for name in task_names}

    async def preflight(self) -> None:
        """Checks that the oracle can answer.

        Raises:
            PreflightError: It cannot.
        """
        await self._oracle.open()

    def check(self, parts: EpisodeParts, *, report: Report) -> None:
        """There is nothing to refuse."""

    def digest(self, task_name: str) -> str:
        """What tells whether an object has changed."""
        return self._objects[task_name].digest

    def make(self, task_name: str, parts: EpisodeParts) -> TwentyQuestionsEnvironment:
        """The environment of one episode."""
        return TwentyQuestionsEnvironment(
            [self._objects[task_name]],
            oracle=self._oracle,
            questions=self._questions,
            limits=parts.limits,
            seed=parts.seed,
            provide_solution=parts.provide_solution,
            output_dir=parts.output_dir,
        )

    def take_over(self, earlier: Path, own: Path) -> None:
        """Has a game that goes on with an earlier try of it told what the oracle said in that one."""
        OracleRecord(own).take_over(OracleRecord(earlier))

    def recorded_usage(self, files: Path) -> EnvironmentUsage:
        """What the oracle used in a game, as its files say."""
        return OracleRecord(files).usage()

    async def close(self) -> None:
        """Closes the oracle. Idempotent."""
        await self._oracle.close()
