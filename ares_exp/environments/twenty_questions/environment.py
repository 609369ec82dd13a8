"""The environment of twenty questions. The policy asks, the oracle answers, and a correct guess earns the reward."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.environment import (
    EnvironmentBase,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    TimeStep,
    check_action,
    no_episode,
    restart,
    termination,
    transition,
    truncation,
)
from ares_exp.environments.episode_limits import PhaseClock
from ares_exp.environments.own_model import EpisodeModel, OwnModel
from ares_exp.environments.source import choose_task
from ares_exp.environments.twenty_questions.game_oracle import READING, HiddenObject, oracle_model, oracle_request
from ares_exp.environments.twenty_questions.replies import MAX_CHARS, is_one_of, parse_reply
from ares_exp.errors import ConfigError, EpisodeStateError
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EnvironmentUsage
from ares_exp.tasks.task_contract import Verdict

RULES = """We play twenty questions. I think of something: an object, an animal, a plant, or the like. You find out
what it is by asking questions that can be answered with yes or no.

- Each of your replies is one question, or one guess, and nothing else.
- I answer a question "Yes.", "No." or "I don't know."
- A guess is a line "Guess: <what you think it is>". "Is it a <name>?" is a guess too, if that is its name.
- You have {questions} replies in all; guesses, and replies that are neither, count as well.
- You win when you guess right before they are used up.
- A reply has at most {max_chars} characters."""
START = "I have thought of something. Ask your first question."
WRONG = "No, that is not it."
UNUSABLE = (
    "I cannot answer that: {reason}. It counts. Ask one question that can be answered with yes or no, or write a line "
    "“Guess: <what you think it is>”."
)


@dataclass(slots=True)
class _Game:
    """The state of one game.

    Attributes:
        hidden: The hidden object.
        oracle: The oracle of this game.
        metadata: Metadata of each request.
        messages: The conversation so far.
        replies: Number of replies from the policy.
        clock: Time that the oracle took.
        truncated_by: The limit that ended the game.
        verdict: The score.
        over: Whether the game has ended.
    """

    hidden: HiddenObject
    oracle: EpisodeModel
    metadata: dict[str, Any] | None
    messages: list[Message] = field(default_factory=list)
    replies: int = 0
    clock: PhaseClock = field(default_factory=PhaseClock)
    truncated_by: LimitName | None = None
    verdict: Verdict | None = None
    over: bool = False


class TwentyQuestionsEnvironment(EnvironmentBase):
    """Runs twenty questions. An observation is the conversation so far, and an action is a question or a guess.

    The FIRST step asks for a question. Each MID step adds the policy's reply and the answer to it, with reward 0.0.
    After a correct guess, the episode terminates with reward 1.0. If all questions are used up, or the caller calls
    `truncate`, it is truncated with reward 0.0. The environment has no container and no code agent.

    Only the oracle knows the hidden object. The policy sees "Yes", "No" or "I don't know", but not the oracle's own
    words.
    """

    time_step: TimeStep[LLMRequest] | None = None

    def __init__(
        self,
        objects: Sequence[HiddenObject],
        *,
        oracle: OwnModel | LLMClient,
        questions: int = 20,
        verify_on_truncation: bool = True,
        seed: int = 0,
        provide_solution: bool = False,
        output_dir: Path | None = None,
    ) -> None:
        """Creates the environment, without starting a game.

        Args:
            objects: Objects from which `reset()` chooses at random.
            oracle: The oracle that answers the questions. The caller opens and closes it.
            questions: Number of replies that the policy has in a game.
            verify_on_truncation: Whether a truncated game has the reward 0.0. If not, it has no reward.
            seed: Seed for choosing objects.
            provide_solution: Whether the winning reply is in `metadata["solution"]` of the requests, for the policy
                that runs solutions.
            output_dir: Directory for the record of the oracle's answers (`oracle.jsonl`), or `None`. If this record
                has answers from an earlier episode, they are used again.

        Raises:
            ConfigError: The list of objects is empty, `questions` is below 1, or the oracle cannot answer questions.
        """
        if not objects:
            raise ConfigError("Expected at least one object for twenty questions, got none.")
        if questions < 1:
            raise ConfigError(f"Expected at least 1 question (`env.questions`), got {questions}.")
        self._objects = list(objects)
        self._oracle = oracle if isinstance(oracle, OwnModel) else oracle_model(oracle)
        self._questions = questions
        self._verify_on_truncation = verify_on_truncation
        self._random = random.Random(seed)
        self._provide_solution = provide_solution
        self._output_dir = output_dir
        self._game: _Game | None = None
        self._calls = OneCallAtATime()

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[LLMRequest]:
        """Starts a game. A game in progress is abandoned.

        Args:
            seed: New seed for choosing objects.
            options: `{"task": name_or_index}` selects the object.

        Raises:
            ConfigError: The object does not exist.
            OracleResponseError: The oracle does not know the object.
        """
        with self._calls.during("reset()"):
            self._give_up()
            if seed is not None:
                self._random.seed(seed)
            hidden = choose_task(self._objects, options or {}, self._random)
            oracle = self._oracle.for_episode(hidden.name, seed=self._random.getrandbits(63), files=self._output_dir)
            metadata = {"solution": f"Guess: {hidden.title}"} if self._provide_solution else None
            self._game = _Game(hidden, oracle, metadata)
            self.time_step = restart(self._request(self._game, START))
            return self.time_step

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest]:
        """Applies the policy's reply.

        Returns:
            MID step with the answer, or LAST step if the object was guessed (termination) or all questions are used up
            (truncation).

        Raises:
            EpisodeStateError: `step` was called before `reset()`, after LAST, or during another call, or the
                environment was closed during this call.
            OracleResponseError: The oracle gave no answer.
            TypeError: `action` is not an `LLMResponse`; the episode continues.
        """
        check_action(action)
        with self._calls.during("step()"):
            game = self._playing()
            try:
                time_step = await self._step(game, action)
            except BaseException:
                self._give_up()
                raise
            if self._game is not game or (game.over and not time_step.last()):
                raise EpisodeStateError("The environment was closed while its episode was running.")
            self.time_step = time_step
            return time_step

    async def truncate(self, limit: LimitName) -> TimeStep[LLMRequest]:
        """Ends the game because `limit` was reached before a correct guess.

        Raises:
            EpisodeStateError: See `step`.
        """
        with self._calls.during("truncate()"):
            self.time_step = self._cut_short(self._playing(), limit)
            return self.time_step

    async def close(self) -> None:
        """Abandons a game in progress. Idempotent. A LAST `time_step` remains available."""
        if self.time_step is None or not self.time_step.last():
            self._give_up()

    @property
    def step_count(self) -> int:
        """Number of replies in this game."""
        return self._game.replies if self._game is not None else 0

    @property
    def current_task(self) -> HiddenObject | None:
        """The hidden object of the game; `None` before the first `reset()`."""
        return self._game.hidden if self._game is not None else None

    @property
    def truncated_by(self) -> LimitName | None:
        """The limit that ended the game: `steps` if the questions were used up; `None` if no limit did."""
        return self._game.truncated_by if self._game is not None else None

    @property
    def verdict(self) -> Verdict | None:
        """Score of the game; `None` before its end, and if a truncated game is not scored."""
        return self._game.verdict if self._game is not None else None

    def report(self) -> EpisodeReport:
        """Returns facts about the game. `phase` is `oracle` while the oracle answers."""
        game = self._game
        if game is None:
            return EpisodeReport(environment_usage=EnvironmentUsage())
        return EpisodeReport(
            task_name=game.hidden.name,
            truncated_by=game.truncated_by,
            rewards=dict(game.verdict.rewards) if game.verdict is not None else {},
            phase=game.clock.phase,
            phase_sec=dict(game.clock.seconds),
            environment_usage=game.oracle.used,
        )

    def _playing(self) -> _Game:
        if self._game is None or self._game.over:
            raise no_episode(ended=self._game is not None)
        return self._game

    def _give_up(self) -> None:
        self.time_step = None
        if self._game is not None:
            self._game.over = True

    async def _step(self, game: _Game, action: LLMResponse) -> TimeStep[LLMRequest]:
        game.replies += 1
        reply = parse_reply(action.text)
        if reply.guess is not None and is_one_of(reply.guess, game.hidden.names):
            game.over, game.verdict = True, Verdict(1.0, {"reward": 1.0})
            return termination(1.0)
        if game.replies >= self._questions:
            return self._cut_short(game, "steps")
        answer = UNUSABLE.format(reason=reply.problem) if reply.problem else WRONG
        if reply.question is not None:
            request = oracle_request(game.hidden, reply.question)
            with game.clock.during("oracle"):
                answer = (await game.oracle.ask(reply.question, request, READING)).value
        game.messages.append(Message(role="assistant", content=action.text))
        return transition(self._request(game, answer))

    def _cut_short(self, game: _Game, limit: LimitName) -> TimeStep[LLMRequest]:
        """Ends the game because of a limit. The reward is 0.0, or `None` without `verify_on_truncation`."""
        game.over, game.truncated_by = True, limit
        if not self._verify_on_truncation:
            return truncation(None)
        game.verdict = Verdict(0.0, {"reward": 0.0})
        return truncation(0.0)

    def _request(self, game: _Game, said: str) -> LLMRequest:
        """Adds the message `said` for the policy to the conversation, and makes the next observation from it."""
        game.messages.append(Message(role="user", content=f"{said} ({self._questions - game.replies} left)"))
        rules = RULES.format(questions=self._questions, max_chars=MAX_CHARS)
        return LLMRequest(list(game.messages), system_prompt=rules, metadata=game.metadata)
