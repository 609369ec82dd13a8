"""The environment of twenty questions: the policy asks, the oracle answers, a right guess is the reward."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ares_exp.environments.environment import check_action
from ares_exp.environments.episode_limits import EpisodeLimits, LimitName
from ares_exp.environments.task_choice import choose_task
from ares_exp.environments.time_step import TimeStep
from ares_exp.environments.twenty_questions.game import Game
from ares_exp.environments.twenty_questions.objects import HiddenObject
from ares_exp.environments.twenty_questions.oracle import GameOracle, Oracle
from ares_exp.environments.twenty_questions.oracle_record import OracleRecord
from ares_exp.errors import ConfigError, EpisodeStateError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.results import EnvironmentUsage
from ares_exp.tasks.task import Verdict


class TwentyQuestionsEnvironment:
    """Plays twenty questions: the conversation so far is the observation, a question or a guess the action.

    FIRST asks for a question. Each MID adds the reply and its answer, with reward 0.0. A right guess is LAST by
    termination with reward 1.0. When the questions are used up, or another limit is reached, LAST is by truncation with
    reward 0.0: it was not guessed. There is no container and no code agent.

    What is hidden is told to the oracle only; the policy sees its yes, no or "I don't know", never its words.
    """

    has_container = False

    def __init__(
        self,
        objects: Sequence[HiddenObject],
        *,
        oracle: Oracle | LLMClient,
        questions: int = 20,
        limits: EpisodeLimits | None = None,
        seed: int = 0,
        provide_solution: bool = False,
        output_dir: Path | None = None,
    ) -> None:
        """Touches nothing yet.

        Args:
            objects: What `reset()` chooses from, by a generator seeded with `seed`.
            oracle: What answers. It stays the caller's to open and to close.
            questions: Replies that the policy has.
            limits: When an episode is truncated besides; the limit on the agent's time holds for the whole game.
            seed: Same seed, same objects in the same order.
            provide_solution: Puts the reply that wins into `metadata["solution"]` of the requests: for the policy that
                plays solutions.
            output_dir: Where it is recorded what the oracle was asked, said and used (`oracle.jsonl`), or `None`. The
                answers there that were taken over from an earlier try are not asked for again.

        Raises:
            ConfigError: There are no objects or no questions, or the oracle cannot answer questions.
        """
        if not objects:
            raise ConfigError("Expected at least one object for twenty questions, got none.")
        if questions < 1:
            raise ConfigError(f"Expected at least 1 question (`env.questions`), got {questions}.")
        self._objects = list(objects)
        self._oracle = oracle if isinstance(oracle, Oracle) else Oracle(oracle)
        self._questions = questions
        self._limits = limits or EpisodeLimits()
        self._random = random.Random(seed)
        self._provide_solution = provide_solution
        self._record = OracleRecord(output_dir) if output_dir is not None else None
        self._game: Game | None = None
        self._asked: GameOracle | None = None
        self._busy = ""
        self.time_step: TimeStep[LLMRequest] | None = None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[LLMRequest]:
        """Starts a game; one under way is given up.

        Args:
            seed: Reseeds the choice of objects.
            options: `{"task": name_or_index}` picks the object.

        Raises:
            ConfigError: No such object.
            OracleAnswerError: The oracle has nothing for it.
        """
        with self._one_call_at_a_time("reset()"):
            self._give_up()
            if seed is not None:
                self._random.seed(seed)
            hidden = choose_task(self._objects, options or {}, self._random)
            game = self._game = Game(
                hidden, self._limits, questions=self._questions, provide_solution=self._provide_solution
            )
            self._asked = self._oracle.for_game(
                hidden, seed=self._random.getrandbits(63), on_wait=game.deadline.move, record=self._record
            )
            self.time_step = game.begin()
            return self.time_step

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        """Takes the policy's reply; `None` says that there was none before `time_left_sec` had passed.

        Returns:
            MID with the answer; LAST when it was guessed (termination) or a limit was reached (truncation). A right
            guess on the very step that also reaches a limit is termination.

        Raises:
            EpisodeStateError: Before `reset()`, after LAST, while another call is under way, or when the environment
                was closed meanwhile.
            OracleAnswerError: The oracle gave no answer.
            TypeError: `action` is something else than an `LLMResponse`; the episode goes on.
        """
        check_action(action)
        with self._one_call_at_a_time("step()"):
            game, asked = self._game, self._asked
            if game is None or asked is None or game.over:
                state = "has not been reset" if game is None else "has ended its episode"
                raise EpisodeStateError(f"step() on an environment that {state}: call reset() first.")
            try:
                time_step = await game.step(action, asked)
            except BaseException:
                self._give_up()
                raise
            if self._game is not game or (game.over and not time_step.last()):
                raise EpisodeStateError("The environment was closed while its episode was under way.")
            self.time_step = time_step
            return time_step

    async def close(self) -> None:
        """Gives up a game under way. Idempotent. A LAST `time_step` stays readable."""
        if self.time_step is None or not self.time_step.last():
            self._give_up()

    async def __aenter__(self) -> Self:
        """Returns the environment itself."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment."""
        await self.close()

    @property
    def step_count(self) -> int:
        """Replies that were counted in the episode."""
        return self._game.step_count if self._game is not None else 0

    @property
    def current_task(self) -> HiddenObject | None:
        """What is hidden."""
        return self._game.hidden if self._game is not None else None

    @property
    def truncated_by(self) -> LimitName | None:
        """The limit that cut the episode short; `steps` when the questions were used up."""
        return self._game.truncated_by if self._game is not None else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether it was guessed."""
        return self._game.verdict if self._game is not None else None

    @property
    def phase(self) -> str | None:
        """What the episode is busy with: `oracle`; `None` while it waits for an action."""
        return self._game.phase if self._game is not None else None

    @property
    def phase_sec(self) -> dict[str, float]:
        """Wall seconds of the episode by phase: `oracle`."""
        return self._game.phase_sec if self._game is not None else {}

    @property
    def environment_usage(self) -> EnvironmentUsage:
        """What the oracle used in the episode."""
        return self._asked.used if self._asked is not None else EnvironmentUsage()

    @property
    def time_left_sec(self) -> float | None:
        """Seconds that the time limit leaves; `None` without a limit, or with no episode under way."""
        return self._game.deadline.left_sec if self._game is not None and not self._game.over else None

    def grant_time(self, seconds: float) -> None:
        """Moves the time limit by what was spent on something else than the episode."""
        if self._game is not None:
            self._game.deadline.move(seconds)

    def _give_up(self) -> None:
        self.time_step = None
        if self._game is not None:
            self._game.over = True

    @contextmanager
    def _one_call_at_a_time(self, what: str) -> Iterator[None]:
        if self._busy:
            raise EpisodeStateError(f"{what} while {self._busy} is under way: await that one first.")
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""
