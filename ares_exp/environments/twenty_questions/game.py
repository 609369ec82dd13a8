"""One game: what was asked and answered so far, and what came of it."""

from __future__ import annotations

import time
from dataclasses import replace

from ares_exp.environments.deadline import Deadline, DeadlinePassedError
from ares_exp.environments.episode_limits import EpisodeLimits, LimitName
from ares_exp.environments.time_step import TimeStep, restart, termination, transition, truncation
from ares_exp.environments.twenty_questions.objects import HiddenObject
from ares_exp.environments.twenty_questions.oracle import GameOracle
from ares_exp.environments.twenty_questions.replies import MAX_CHARS, Guess, Reply, Unusable, is_one_of, parse_reply
from ares_exp.llms.request import LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.task import Verdict

RULES = """We play twenty questions. I think of something: an object, an animal, a plant, or the like. You find out
what it is by asking questions that can be answered with yes or no.

- Each of your replies is one question, or one guess, and nothing else.
- A question ends in a question mark. I answer "Yes.", "No." or "I don't know."
- A guess is a line "Guess: <what you think it is>". "Is it a <name>?" is a guess too, if that is its name.
- You have {questions} replies in all; guesses, and replies that are neither, count as well.
- You win when you guess right before they are used up.
- A reply has at most {max_chars} characters."""

BEGIN = "I have thought of something. Ask your first question."
WRONG = "No, that is not it."
UNUSABLE = (
    "I cannot answer that: {reason}. It counts. Ask one question that can be answered with yes or no, or write a line "
    "“Guess: <what you think it is>”."
)
LEFT = "({left} left)"


class Game:
    """One playing of one object. Begun once, stepped to its LAST.

    Attributes:
        hidden: What is to be guessed.
        step_count: Replies that were counted.
        truncated_by: The limit that ended it.
        verdict: Whether it was guessed; `None` while that is open, and where a truncated game is not judged.
        phase: `oracle` while the oracle is asked; `None` otherwise.
        phase_sec: Wall seconds by phase.
        deadline: Until when it may go on.
        over: Whether it has ended, or was given up.
    """

    def __init__(self, hidden: HiddenObject, limits: EpisodeLimits, *, questions: int, provide_solution: bool) -> None:
        """Nothing is asked yet; the time runs.

        Args:
            hidden: What is to be guessed.
            limits: When it is truncated.
            questions: After how many replies it is truncated at the latest.
            provide_solution: Whether the requests hold the reply that wins.
        """
        self.hidden = hidden
        self.step_count = 0
        self.truncated_by: LimitName | None = None
        self.verdict: Verdict | None = None
        self.phase: str | None = None
        self.phase_sec: dict[str, float] = {}
        self.deadline = Deadline(limits.time.agent(None))
        self.over = False
        self._limits = replace(limits, steps=questions if limits.steps is None else min(questions, limits.steps))
        self._metadata = {"solution": f"Guess: {hidden.title}"} if provide_solution else None
        self._messages = [Message(role="user", content=f"{BEGIN} {self._left}")]
        self._tokens, self._cost = 0, 0.0

    def begin(self) -> TimeStep[LLMRequest]:
        """FIRST: asks for the first question."""
        return restart(self._request())

    async def step(self, action: LLMResponse | None, oracle: GameOracle) -> TimeStep[LLMRequest]:
        """Takes a reply, and has it answered.

        Args:
            action: The reply; `None`: there was none in time.
            oracle: Answers questions.

        Raises:
            OracleAnswerError: It could not.
        """
        if action is None or self.deadline.left_sec == 0:
            return self._cut_short("time")
        self.step_count += 1
        self._tokens += action.usage.total_tokens
        self._cost += action.cost
        reply = parse_reply(action.text)
        if self._is_right(reply):
            self.over, self.verdict = True, _verdict(1.0)
            return termination(1.0)
        limit = self._limits.reached(steps=self.step_count, tokens=self._tokens, cost=self._cost)
        if limit is not None:
            return self._cut_short(limit)
        try:
            async with self.deadline.hold():
                answer = await self._answer(reply, oracle)
        except DeadlinePassedError:
            return self._cut_short("time")
        self._messages.append(Message(role="assistant", content=action.text))
        self._messages.append(Message(role="user", content=f"{answer} {self._left}"))
        return transition(self._request())

    def _is_right(self, reply: Reply) -> bool:
        if isinstance(reply, Unusable):
            return False
        said = reply.name if isinstance(reply, Guess) else reply.names
        return said is not None and is_one_of(said, self.hidden.names)

    async def _answer(self, reply: Reply, oracle: GameOracle) -> str:
        if isinstance(reply, Unusable):
            return UNUSABLE.format(reason=reply.reason)
        if isinstance(reply, Guess):
            return WRONG
        began, self.phase = time.perf_counter(), "oracle"
        try:
            return (await oracle.answer(reply.text)).value
        finally:
            self.phase = None
            self.phase_sec["oracle"] = self.phase_sec.get("oracle", 0.0) + time.perf_counter() - began

    def _cut_short(self, limit: LimitName) -> TimeStep[LLMRequest]:
        self.over, self.truncated_by = True, limit
        if self._limits.verify_on_truncation:
            self.verdict = _verdict(0.0)
        return truncation(self.verdict.reward if self.verdict is not None else None)

    @property
    def _questions(self) -> int:
        assert self._limits.steps is not None
        return self._limits.steps

    @property
    def _left(self) -> str:
        return LEFT.format(left=self._questions - self.step_count)

    def _request(self) -> LLMRequest:
        rules = RULES.format(questions=self._questions, max_chars=MAX_CHARS)
        return LLMRequest(self._messages, system_prompt=rules, metadata=self._metadata)


def _verdict(reward: float) -> Verdict:
    return Verdict(reward, {"reward": reward})
