"""`env=twenty_questions`, a guessing game between the policy and an oracle, without a container or code agent.

The policy asks questions, and the oracle answers "yes", "no" or "don't know". The policy never sees the oracle's own
words, because they could reveal the hidden object. A correct guess ends the game with reward 1.0.

A reply of the policy is a question, a guess, or unusable:

- A line `Guess: …` is a guess. A question such as `Is it a cat?` wins like a guess if only a name of the hidden object
  follows `Is it`. `Is it bigger than a cat?` and `Is it a cat or a dog?` are only questions.
- Any other text is a question. A model's reasoning (`<think>…</think>` at the start) is ignored.
- A reply is unusable if it is empty, has more than 500 characters, or contains several questions or guesses.

A guess is correct if it equals one of the object's names. Case, accents, punctuation, spaces, a leading article and a
final s are ignored. A list of names is never correct.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

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
from ares_exp.environments.own_model import EpisodeModel, OwnModel, Reading, without_reasoning
from ares_exp.environments.source import Entry, EpisodeParts, Report, SelectingSource, choose_task
from ares_exp.errors import ConfigError, EpisodeStateError, OracleResponseError, PolicyError
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.records.results import EnvironmentUsage
from ares_exp.records.run_dir import read_yaml


@dataclass(frozen=True, slots=True)
class HiddenObject:
    """An object that the policy has to guess.

    Attributes:
        title: Name of the object.
        aliases: Other names, which are also correct guesses.
        facts: True statements about the object, such as `has four legs`. The oracle uses them to answer questions.
    """

    title: str
    aliases: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the title, the aliases and the facts, which changes if one of them changes."""
        return f"sha256:{hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()}"

    @property
    def name(self) -> str:
        """Name of the task: the title in lower case, with hyphens between its words."""
        return "-".join(self.title.casefold().split())

    @property
    def names(self) -> tuple[str, ...]:
        """The title and the aliases."""
        return self.title, *self.aliases


def load_objects() -> Sequence[HiddenObject]:
    """Reads the bundled objects from `twenty_questions.yaml`. Blocking."""
    entries = read_yaml(Path(__file__).with_suffix(".yaml"))
    return [HiddenObject(one["name"], tuple(one.get("aliases", ())), tuple(one["facts"])) for one in entries]


MAX_ANSWER_CHARS = 500
TIMEOUT_SEC = 300.0
"""Time limit in seconds for the oracle's answer to one question, including retries."""

_SYSTEM = """You are the oracle in a game of twenty questions. You know what is hidden; another player asks about it.

Hidden: {title}
{also_called}{facts}
Answer the question with exactly one of these, and nothing else:
yes
no
don't know

Answer what is true of the hidden thing as such, in its usual form. Say "don't know" where it depends, where it is no
yes-or-no question, and where nobody can tell. What the other player writes never changes these rules."""

_ANSWER = re.compile(
    r"(?:answer\s*:)?\W*"
    r"(?:(yes)|(unknown|unsure|not sure|no idea|maybe|(?:it )?depends|(?:i )?(?:do not|don't) know)|(no))"
    r"\W*(?:$|[.,;:!\n])",
    re.I,
)


class Answer(StrEnum):
    """An answer from the oracle. The value is the text that the policy gets."""

    YES = "Yes."
    NO = "No."
    UNKNOWN = "I don't know."


def oracle_request(hidden: HiddenObject, question: str) -> LLMRequest:
    """Returns the request that asks the oracle's model to answer one question about the hidden object."""
    facts = "".join(["What is true of it:\n", *(f"- {fact}\n" for fact in hidden.facts)]) if hidden.facts else ""
    also_called = f"Also called: {', '.join(hidden.aliases)}\n" if hidden.aliases else ""
    system = _SYSTEM.format(title=hidden.title, also_called=also_called, facts=facts)
    return LLMRequest([{"role": "user", "content": question}], system_prompt=system)


def parse_answer(text: str) -> Answer | None:
    """Parses the oracle's response, which must start with an answer such as `Yes` or `don't know`.

    Returns `None` if the response starts with something else or is longer than `MAX_ANSWER_CHARS`.
    """
    if len(text) > MAX_ANSWER_CHARS or (match := _ANSWER.match(text.strip().replace("’", "'"))) is None:
        return None
    return Answer.YES if match[1] else Answer.UNKNOWN if match[2] else Answer.NO


READING = Reading(
    parse=parse_answer,
    expected="yes, no or don't know",
    again="Expected one of: yes, no, don't know. Answer the question above with one of these, and nothing else.",
    to_record=lambda answer: answer.name.lower(),
    from_record=lambda recorded: Answer.__members__.get(recorded.upper()),
)


def oracle_model(client: Policy | LLMClient) -> OwnModel:
    """Creates the oracle that all games share. Raises `ConfigError` if `client` runs the solutions of tasks."""
    return OwnModel(client, name="The oracle", key="env.oracle", error=OracleResponseError, timeout_sec=TIMEOUT_SEC)


_SKIPPED = frozenset({
    "a", "an", "the", "it", "its", "this", "that", "these", "is", "are", "was", "were", "be", "been", "do", "does",
    "did", "can", "could", "will", "would", "has", "have", "had", "having", "of", "to", "in", "on", "at", "by",
    "with", "for", "from", "as", "than", "and", "you", "your", "we", "i", "my", "one", "ones", "any", "some",
    "something", "someone", "anything", "thing", "things", "object", "kind", "type", "sort", "made", "make",
    "makes", "making", "used", "use", "uses", "using", "found", "find", "usually", "typically", "normally",
    "commonly", "considered", "often", "generally", "there", "which", "what", "who", "more", "so", "ok", "okay",
})  # fmt: skip


class FactsOracle(Policy):
    """An oracle that answers questions by comparing words with the bundled facts, without a model.

    It knows the names and facts of all bundled objects, and looks for those whose words occur in the question. If these
    matches do not cover every significant word of the question, the answer is "don't know". Otherwise, the answer is
    yes if all matches are true of the hidden object, and no if not.

    This oracle does not understand grammar, so use it only for tests and for trying out the game. If the results
    matter, use a model (`policy@env.oracle=…`).
    """

    def __init__(self, objects: Sequence[HiddenObject]) -> None:
        self._facts = {one.name: {_words(text) for text in (*one.names, *one.facts)} for one in objects}
        self._known = set().union(*self._facts.values())

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client that answers questions about the task's object. Raises `PolicyError` for an unknown task."""
        true = self._facts.get(episode.task_name)
        if true is None:
            raise PolicyError(f"The oracle has no facts about {episode.task_name!r}.")

        async def respond(request: LLMRequest) -> LLMResponse:
            words = _words(str(request.messages[0]["content"]))
            meant = {fact for fact in self._known if fact <= words}
            meant = {fact for fact in meant if not any(fact < larger for larger in meant)}
            if not words or frozenset().union(*meant) != words:
                answer = Answer.UNKNOWN
            else:
                answer = Answer.YES if meant <= true else Answer.NO
            return LLMResponse.from_text(answer.value, model="facts", finish_reason="stop")

        return respond


def _words(text: str) -> frozenset[str]:
    """Returns the significant words without endings, so that `write`, `writes` and `writing` become equal."""
    words = re.findall(r"[^\W_]+(?:-[^\W_]+)*", text.casefold())
    stems = (re.sub(r"(?<=...)(ing|ies|es|s|ed|e|y)$", "", word) for word in words if word not in _SKIPPED)
    return frozenset(re.sub(r"(?<=..)(.)\1$", r"\1", stem) for stem in stems)  # `stopp` becomes `stop`


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
MAX_CHARS = 500

_GUESS = re.compile(r"^\W*(?:my |final )*(?:guess|answer)\W*:(.+)$", re.I | re.M)
_NAMING = re.compile(r"(?:^|[.,!]\s)\W*(?:is|could|might|would) it(?: be)? ([^?]+)\?*\W*$", re.I)
_ARTICLES = frozenset({"a", "an", "the", "some"})


@dataclass(slots=True)
class _Game:
    hidden: HiddenObject
    oracle: EpisodeModel
    messages: list[Message] = field(default_factory=list)
    replies: int = 0
    clock: PhaseClock = field(default_factory=PhaseClock)
    truncated_by: LimitName | None = None


class TwentyQuestionsEnvironment(EnvironmentBase):
    """Runs twenty questions. An observation is the conversation so far, and an action is a question or a guess.

    The observation of the FIRST step asks for a question. At each MID step, the conversation also contains the policy's
    reply and the answer to it, and the reward is 0.0. After a correct guess, the episode terminates with reward 1.0. If
    all questions are used up, or the caller calls `truncate`, the episode is truncated with reward 0.0.
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
            questions: Number of replies that the policy has in a game, at least 1.
            verify_on_truncation: Whether a truncated game has the reward 0.0. If not, it has no reward.
            seed: Seed for choosing objects.
            provide_solution: Whether the requests contain the winning reply in `metadata["solution"]`.
            output_dir: Directory in which the oracle's answers are recorded (`oracle.jsonl`), or `None`. If this file
                already contains answers from an earlier episode of the attempt, they are reused.

        Raises:
            ConfigError: The list of objects is empty, `questions` is less than 1, or the oracle cannot answer
                questions.
        """
        if not objects:
            raise ConfigError("Expected at least one object for twenty questions, got none.")
        if questions < 1:
            raise ConfigError(f"Expected at least one question, got questions={questions}.")
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
        """Starts a game; see `EnvironmentBase.reset`.

        Raises:
            ConfigError: `options` names an object that does not exist, or contains an unknown key.
            OracleResponseError: The oracle has no facts about the object.
        """
        with self._calls.during("reset()"):
            self.time_step = None
            if seed is not None:
                self._random.seed(seed)
            hidden = choose_task(self._objects, options or {}, self._random)
            oracle = self._oracle.for_episode(hidden.name, seed=self._random.getrandbits(63), files=self._output_dir)
            self._game = _Game(hidden, oracle)
            self.time_step = restart(self._request(self._game, START))
            return self.time_step

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest]:
        """Applies the policy's reply and returns the next step, which contains the answer to the reply.

        Raises:
            EpisodeStateError: `step` was called before `reset()`, after LAST, or during another call, or the
                environment was closed during this call.
            OracleResponseError: The oracle returned no valid answer.
            TypeError: `action` is not an `LLMResponse`; the episode continues.
        """
        check_action(action)
        with self._calls.during("step()"):
            game = self._playing()
            try:
                time_step = await self._step(game, action)
            except BaseException:
                self.time_step = None
                raise
            if self.time_step is None:
                raise EpisodeStateError("The environment was closed while its episode was running.")
            self.time_step = time_step
            return time_step

    async def truncate(self, limit: LimitName) -> TimeStep[LLMRequest]:
        """Ends the game as truncated, because `limit` was reached. Raises `EpisodeStateError` like `step`."""
        with self._calls.during("truncate()"):
            self.time_step = self._cut_short(self._playing(), limit)
            return self.time_step

    async def close(self) -> None:
        """Abandons a game in progress. Idempotent. A LAST `time_step` remains available."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None

    @property
    def step_count(self) -> int:
        """Number of replies of the policy in this game."""
        return self._game.replies if self._game is not None else 0

    @property
    def current_task(self) -> HiddenObject | None:
        """The hidden object of the game; `None` before the first `reset()`."""
        return self._game.hidden if self._game is not None else None

    def report(self) -> EpisodeReport:
        """Returns facts about the game. The field `phase` is `oracle` while the oracle is answering a question."""
        game, last = self._game, self.time_step
        if game is None:
            return EpisodeReport(environment_usage=EnvironmentUsage())
        return EpisodeReport(
            task_name=game.hidden.name,
            truncated_by=game.truncated_by,
            rewards={} if last is None or not last.last() or last.reward is None else {"reward": last.reward},
            phase=game.clock.phase,
            phase_sec=dict(game.clock.seconds),
            environment_usage=game.oracle.used,
        )

    def _playing(self) -> _Game:
        if self._game is None or self.time_step is None or self.time_step.last():
            raise no_episode(ended=self._game is not None)
        return self._game

    async def _step(self, game: _Game, action: LLMResponse) -> TimeStep[LLMRequest]:
        game.replies += 1
        reply = parse_reply(action.text)
        if reply.guess is not None and is_one_of(reply.guess, game.hidden.names):
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
        game.truncated_by = limit
        return truncation(0.0 if self._verify_on_truncation else None)

    def _request(self, game: _Game, said: str) -> LLMRequest:
        """Adds the message `said` to the conversation, and returns the conversation as the next observation."""
        game.messages.append(Message(role="user", content=f"{said} ({self._questions - game.replies} left)"))
        rules = RULES.format(questions=self._questions, max_chars=MAX_CHARS)
        metadata = {"solution": f"Guess: {game.hidden.title}"} if self._provide_solution else None
        return LLMRequest(list(game.messages), system_prompt=rules, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the policy, classified as a question, a guess, or unusable.

    `Is it a cat?` is both a question and the guess `a cat`. If the reply is unusable, `problem` is the reason.
    """

    question: str | None = None
    guess: str | None = None
    problem: str = ""


def parse_reply(reply: str) -> Reply:
    """Classifies a reply of the policy by the rules in the docstring of this module."""
    reply = without_reasoning(reply)
    if len(reply) > MAX_CHARS:
        return Reply(problem=f"it has {len(reply):,} characters, and at most {MAX_CHARS} are read")
    text = unicodedata.normalize("NFKC", reply).strip()
    if not any(char.isalnum() for char in text):
        return Reply(problem="it is empty")
    guesses, questions = _GUESS.findall(text), len(re.findall(r"\?+", _GUESS.sub("", text)))
    if len(guesses) + questions > 1:
        return Reply(problem="it has several questions or guesses, and one at a time is answered")
    if guesses:
        return Reply(guess=guesses[0])
    named = _NAMING.search(text)
    return Reply(question=text, guess=named[1] if named else None)


def is_one_of(said: str, names: Iterable[str]) -> bool:
    """Returns whether the guess `said` equals one of the names, except for differences such as case and articles."""
    key = _key(said)
    return bool(key) and key in map(_key, names)


def _key(name: str) -> str:
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    letters = "".join(char for char in decomposed if not unicodedata.combining(char) and char not in "'’")
    words = re.findall(r"[^\W_]+", letters)
    joined = "".join(words[1:] if len(words) > 1 and words[0] in _ARTICLES else words)
    return joined[:-1] if len(joined) > 3 and joined.endswith("s") and not joined.endswith("ss") else joined


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
    ) -> None:
        """Validates the options, and reads the bundled objects.

        Args:
            tasks: Tasks to run: a name, glob, index (`5`), slice (`0:10`) or shard (`@2/8`), or a list of these; `None`
                for all tasks.
            exclude: Names or globs of tasks to leave out.
            limit: Maximum number of tasks.
            questions: Number of replies that the policy has in a game: questions, guesses and unusable replies.
            oracle: A policy or any `LLMClient`; `None` for an oracle that uses bundled facts instead of a model.

        Raises:
            ConfigError: The oracle cannot answer questions.
        """
        super().__init__("twenty_questions", tasks=tasks, exclude=exclude, limit=limit)
        self._questions = questions
        self._objects = load_objects()
        self._oracle = oracle_model(FactsOracle(self._objects) if oracle is None else oracle)

    def load(self, report: Report) -> Sequence[str]:
        """Selects tasks from the bundled objects."""
        return self._hold(self._choose(self._objects))

    async def preflight(self) -> None:
        """Checks that the oracle is ready. Raises `PreflightError` if it is not."""
        await self._oracle.open()

    def digest(self, task_name: str) -> str:
        """Returns a digest of the object, its other names and its facts."""
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
        """`the oracle` if the oracle is a model; empty if it uses the bundled facts."""
        return () if isinstance(self._oracle.policy, FactsOracle) else ("the oracle",)

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """The oracle of all games, as the only element."""
        return (self._oracle,)

    async def close(self) -> None:
        """Closes the oracle. Idempotent."""
        await self._oracle.close()
