"""Messages between a run and its hosts: errors as data, requests as differences, facts."""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, Self

from ares_exp.containers.activity import Activity
from ares_exp.environment import MAIN_CONVERSATION, EpisodeReport, PastStep, PendingRequest, TimeStep
from ares_exp.llms.request import LLMRequest
from ares_exp.records.environment_responses import Asked

MAX_DETAIL_CHARS = 20_000
"""Bound on the traceback that goes with an error."""


class ForeignError(Exception):
    """Stands for an error whose class is not here, or that cannot be made of its parts: same name, same text."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, taken apart: it arrives whatever its class is made of.

    Attributes:
        module, name: Its class.
        arguments: What `__new__` of its class takes, and its `args`, pickled; `None` when they cannot be.
        attributes: Those of its attributes that can be pickled, each by itself.
        message: Its text.
        detail: Its traceback.
    """

    module: str
    name: str
    arguments: bytes | None
    attributes: Mapping[str, bytes]
    message: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Takes an error apart."""
        pickled = {name: _pickled(value) for name, value in vars(error).items() if name != "__notes__"}
        return cls(
            module=type(error).__module__,
            name=type(error).__qualname__,
            arguments=_pickled((_arguments_of(error), error.args)),
            attributes={name: data for name, data in pickled.items() if data is not None},
            message=_text_of(error),
            detail="".join(traceback.format_exception(error))[-MAX_DETAIL_CHARS:],
        )

    def error(self, host: str) -> BaseException:
        """Makes the error again, with a note that says where it was raised.

        Args:
            host: Where that was.
        """
        made = self._same_class()
        if made is None or _text_of(made) != self.message:
            made = type(self.name.rpartition(".")[2], (ForeignError,), {})(self.message)
        made.add_note(f"Raised on {host}:\n{self.detail}")
        return made

    def _same_class(self) -> BaseException | None:
        if self.arguments is None:
            return None
        try:
            kind: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                kind = getattr(kind, part)
            if not issubclass(kind, BaseException):
                return None
            arguments, args = pickle.loads(self.arguments)
            made: BaseException = kind.__new__(kind, *arguments)
            made.args = args
            vars(made).update({name: pickle.loads(data) for name, data in self.attributes.items()})
        except Exception:  # its constructor, or what its attributes are made of, may be anything
            return None
        return made


def _arguments_of(error: BaseException) -> tuple[Any, ...]:
    """Returns its `args`; of an `OSError` the names of files, too, which `args` lacks."""
    if not isinstance(error, OSError):
        return error.args
    reduced = error.__reduce__()
    return reduced[1] if isinstance(reduced, tuple) and reduced[0] is type(error) else error.args


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # whatever the object's own `__reduce__` raises
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"{type(error).__name__} without a text: {type(failed).__name__}"


class RequestDifference(NamedTuple):
    """A request as the difference to an earlier one, so that a step does not carry the whole conversation.

    Attributes:
        number: Of the request, in its environment.
        base: Number of the earlier request; `None`: the difference is all of it.
        kept: How many messages are those of the earlier request.
        rest: The request, with the other messages alone.
        same: Fields in which it equals the earlier one, and that `rest` lacks.
    """

    number: int
    base: int | None
    kept: int
    rest: LLMRequest
    same: tuple[str, ...] = ()


_LARGE = ("system_prompt", "tools")
"""Fields that rarely change and may be long."""

Bases = Mapping[str, int]
"""By conversation, the number of the latest request that the other side has."""


class RequestEncoder:
    """Takes requests apart, against those that the other side has said it has."""

    def __init__(self) -> None:
        self._numbers = count()
        self._sent: dict[int, tuple[str, LLMRequest]] = {}

    def acknowledge(self, bases: Bases) -> None:
        """Forgets requests before those that the other side has."""
        self._sent = {n: one for n, one in self._sent.items() if n >= bases.get(one[0], 0)}

    def encode(self, observation: Any, bases: Bases) -> Any:
        """Returns the difference of a request; anything else as it is."""
        if not isinstance(observation, LLMRequest):
            return observation
        conversation = conversation_of(observation)
        for number, (_, known) in self._sent.items():
            if known is observation:
                return self._difference(number, observation, conversation, bases)
        number = next(self._numbers)
        self._sent[number] = (conversation, observation)
        return self._difference(number, observation, conversation, bases)

    def encode_past(self, past: Sequence[PastStep]) -> tuple[PastStep, ...]:
        """Returns time steps with their requests taken apart, each against the one before it."""
        bases: dict[str, int] = {}
        encoded = []
        for one in past:
            time_step = coded_step(one.time_step, lambda request: self.encode(request, bases))
            if isinstance(sent := time_step.observation, RequestDifference):
                bases[conversation_of(sent.rest)] = sent.number
            encoded.append(replace(one, time_step=time_step))
        return tuple(encoded)

    def _difference(self, number: int, request: LLMRequest, conversation: str, bases: Bases) -> RequestDifference:
        base = bases.get(conversation)
        if base is None or base not in self._sent or base >= number:
            return RequestDifference(number, None, 0, request)
        earlier = self._sent[base][1]
        kept = 0
        for before, now in zip(earlier.messages, request.messages, strict=False):
            if before is not now and before != now:
                break
            kept += 1
        same = tuple(name for name in _LARGE if getattr(earlier, name) == getattr(request, name))
        shared: dict[str, Any] = dict.fromkeys(same)
        rest = replace(request, messages=request.messages[kept:], **shared)
        return RequestDifference(number, base, kept, rest, same)


class RequestDecoder:
    """Puts requests together again. Messages that they share are the same objects."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, LLMRequest]] = {}
        self.bases: dict[str, int] = {}

    def decode(self, sent: Any) -> Any:
        """Returns the request of a difference; anything else as it is."""
        if not isinstance(sent, RequestDifference):
            return sent
        if sent.number in self._known:
            return self._known[sent.number][1]
        request = sent.rest
        if sent.base is not None:
            earlier = self._known[sent.base][1]
            same = {name: getattr(earlier, name) for name in sent.same}
            request = replace(request, messages=(*earlier.messages[: sent.kept], *request.messages), **same)
        conversation = conversation_of(request)
        self._known[sent.number] = (conversation, request)
        self.bases[conversation] = max(sent.number, self.bases.get(conversation, 0))
        return request

    def forget(self, bases: Bases) -> None:
        """Forgets requests before `bases`, which the other side no longer refers to."""
        self._known = {n: one for n, one in self._known.items() if n >= bases.get(one[0], 0)}


def conversation_of(request: LLMRequest) -> str:
    """Returns the conversation that a request belongs to."""
    return MAIN_CONVERSATION if request.origin is None else request.origin.conversation


class EnvironmentOrder(NamedTuple):
    """What a host makes an environment from.

    Attributes:
        task_name: Its task.
        parts: Of its episode, without the factories.
        streams: Whether files of the episode are kept in the host, to be fetched.
        has_background_requests: Whether the run answers background requests of its agent.
    """

    task_name: str
    parts: Mapping[str, Any]
    streams: bool
    has_background_requests: bool = False


class Facts(NamedTuple):
    """What can be asked of an environment without a call, as of the end of a call.

    Attributes:
        report: Its report; `None`: the one that the run has said to have.
        report_number: Tells reports of replies from each other.
        step_count: Number of time steps since FIRST.
        has_started: Whether it was reset; without that there is nothing to tell.
        step_type: Of its time step; `None` when it has none.
        time_left_sec: Seconds until its time limit.
        activity: The agent's activity in the container.
        pending: Unanswered requests, taken apart.
        keeps_past: After `reset`, whether it knows its past steps.
        past: After `reset`, its past steps without the last one; their requests taken apart.
        has_files: Whether files of the episode are kept on the node, to be fetched.
    """

    report: EpisodeReport | None = None
    report_number: int = 0
    step_count: int = 0
    has_started: bool = False
    step_type: str | None = None
    time_left_sec: float | None = None
    activity: Activity | None = None
    pending: tuple[PendingRequest, ...] = ()
    keeps_past: bool = False
    past: tuple[PastStep, ...] = ()
    has_files: bool = False


class Reply(NamedTuple):
    """The outcome of a call of an environment.

    Attributes:
        value: What it returned; requests in it are taken apart.
        failure: What it raised; `None` when it returned.
        facts: Of the environment afterwards.
    """

    value: Any = None
    failure: Failure | None = None
    facts: Facts = Facts()


def coded_step(time_step: TimeStep[Any], code: Callable[[Any], Any]) -> TimeStep[Any]:
    """Returns the step as one of this package, with `code` applied to its observation."""
    return TimeStep(time_step.step_type, time_step.reward, time_step.discount, code(time_step.observation))


@dataclass(frozen=True, slots=True)
class ClientOfModel:
    """Which client of which model is asked.

    Attributes:
        number: Of the client, in its host.
        key: Where the model is configured.
        environment: Id of the environment that asks; `None` when that is not known.
        task_name, attempt, seed: Of its `EpisodeSpec`.
    """

    number: int
    key: str
    environment: str | None
    task_name: str
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Question:
    """What a host asks of the run, answered with `answer(number, …)`.

    Attributes:
        number: Of the question, in its host.
    """

    number: int


@dataclass(frozen=True, slots=True)
class AskModel(Question):
    """A response of a model is needed."""

    client: ClientOfModel
    request: LLMRequest


@dataclass(frozen=True, slots=True)
class RespondInBackground(Question):
    """The policy is to answer a background request of an environment's agent."""

    environment: str
    request: LLMRequest


@dataclass(frozen=True, slots=True)
class ReadRecord(Question):
    """The record of an episode's own questions is needed."""

    environment: str


@dataclass(frozen=True, slots=True)
class AppendRecord(Question):
    """A question is to be put on record."""

    environment: str
    key: str
    asked: Asked


@dataclass(frozen=True, slots=True)
class Reported:
    """The report of an environment that is busy has changed."""

    environment: str
    report: EpisodeReport


@dataclass(frozen=True, slots=True)
class Logged:
    """A warning was logged on a node."""

    logger: str
    level: int
    text: str


News = Question | Reported | Logged
"""What a host tells the run when it is asked for news."""
