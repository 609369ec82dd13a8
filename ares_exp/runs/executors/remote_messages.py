"""Messages between a run and its hosts: serialized errors, requests as differences, and facts."""

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
"""Maximum length of the traceback of an error, in characters."""


class ForeignError(Exception):
    """Replaces an error whose class is missing or that cannot be recreated. It has the same name and message."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A serialized error, which can be sent for any class of error.

    Attributes:
        module, name: Module and name of the error's class.
        arguments: Pickled arguments of the class's `__new__`, and pickled `args`; `None` if they cannot be pickled.
        attributes: Pickled attributes. Attributes that cannot be pickled are omitted.
        message: Message of the error.
        detail: Traceback of the error.
    """

    module: str
    name: str
    arguments: bytes | None
    attributes: Mapping[str, bytes]
    message: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Serializes an error."""
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
        """Recreates the error, with a note about its origin.

        Args:
            host: Name of the host that raised the error.
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
        except Exception:  # the constructor and the attributes can raise any exception
            return None
        return made


def _arguments_of(error: BaseException) -> tuple[Any, ...]:
    """Returns the `args` of an error. For an `OSError`, includes the file names, which are not in `args`."""
    if not isinstance(error, OSError):
        return error.args
    reduced = error.__reduce__()
    return reduced[1] if isinstance(reduced, tuple) and reduced[0] is type(error) else error.args


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # `__reduce__` of the object can raise any exception
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"{type(error).__name__} without a text: {type(failed).__name__}"


class RequestDifference(NamedTuple):
    """A request as the difference to an earlier request, so that a step does not send the whole conversation.

    Attributes:
        number: Number of the request in its environment.
        base: Number of the earlier request; `None` if `rest` is the whole request.
        kept: Number of messages that are shared with the earlier request.
        rest: The request with only its other messages.
        same: Names of fields that equal the earlier request's fields and are omitted in `rest`.
    """

    number: int
    base: int | None
    kept: int
    rest: LLMRequest
    same: tuple[str, ...] = ()


_LARGE = ("system_prompt", "tools")
"""Fields that rarely change and can be long."""

Bases = Mapping[str, int]
"""The number of the latest request that the other side has, by conversation."""


class RequestEncoder:
    """Encodes requests as differences to requests that the other side has acknowledged."""

    def __init__(self) -> None:
        self._numbers = count()
        self._sent: dict[int, tuple[str, LLMRequest]] = {}

    def acknowledge(self, bases: Bases) -> None:
        """Forgets requests that are older than the requests in `bases`."""
        self._sent = {n: one for n, one in self._sent.items() if n >= bases.get(one[0], 0)}

    def encode(self, observation: Any, bases: Bases) -> Any:
        """Returns a request as a difference. Returns other values unchanged."""
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
        """Returns time steps with encoded requests, each as the difference to the previous request."""
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
    """Decodes requests. Shared messages of several requests are the same objects."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, LLMRequest]] = {}
        self.bases: dict[str, int] = {}

    def decode(self, sent: Any) -> Any:
        """Returns the request of a difference. Returns other values unchanged."""
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
        """Forgets requests that are older than `bases`, because the other side no longer refers to them."""
        self._known = {n: one for n, one in self._known.items() if n >= bases.get(one[0], 0)}


def conversation_of(request: LLMRequest) -> str:
    """Returns the conversation that a request belongs to."""
    return MAIN_CONVERSATION if request.origin is None else request.origin.conversation


class EnvironmentOrder(NamedTuple):
    """The order from which a host creates an environment.

    Attributes:
        task_name: Name of the task.
        parts: Parts of the episode, without the factories.
        streams: Whether files of the episode are stored in the host until the run fetches them.
        has_background_requests: Whether the run responds to background requests of the agent.
    """

    task_name: str
    parts: Mapping[str, Any]
    streams: bool
    has_background_requests: bool = False


class Facts(NamedTuple):
    """The state of an environment at the end of a call.

    Attributes:
        report: Report of the environment; `None` if the run already has this report.
        report_number: Number of the report among the reports of replies.
        step_count: Number of time steps after FIRST.
        has_started: Whether the environment was reset. Otherwise, the other fields are empty.
        step_type: Type of the current time step; `None` without a time step.
        time_left_sec: Time until the time limit, in seconds.
        activity: Activity of the agent in the container.
        pending: Unanswered requests, encoded.
        keeps_past: Whether the environment has past steps (only after `reset`).
        past: Past steps without the last one, with encoded requests (only after `reset`).
        has_files: Whether files of the episode are on the node and must be fetched.
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
    """The outcome of a call to an environment.

    Attributes:
        value: Return value, with encoded requests.
        failure: Error that was raised; `None` if the call succeeded.
        facts: State of the environment after the call.
    """

    value: Any = None
    failure: Failure | None = None
    facts: Facts = Facts()


def coded_step(time_step: TimeStep[Any], code: Callable[[Any], Any]) -> TimeStep[Any]:
    """Returns the step as a `TimeStep` of this package, with `code` applied to its observation."""
    return TimeStep(time_step.step_type, time_step.reward, time_step.discount, code(time_step.observation))


@dataclass(frozen=True, slots=True)
class ClientOfModel:
    """The identity of a model's client in a host.

    Attributes:
        number: Number of the client in its host.
        key: Config key of the model.
        environment: Id of the environment that asks; `None` if unknown.
        task_name, attempt, seed: Fields of the client's `EpisodeSpec`.
    """

    number: int
    key: str
    environment: str | None
    task_name: str
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a host to the run, which replies with `answer(number, …)`.

    Attributes:
        number: Number of the question in its host.
    """

    number: int


@dataclass(frozen=True, slots=True)
class AskModel(Question):
    """A request for a response of a model."""

    client: ClientOfModel
    request: LLMRequest


@dataclass(frozen=True, slots=True)
class RespondInBackground(Question):
    """A background request of an environment's agent to the policy."""

    environment: str
    request: LLMRequest


@dataclass(frozen=True, slots=True)
class ReadRecord(Question):
    """A request for the record of an episode's questions."""

    environment: str


@dataclass(frozen=True, slots=True)
class AppendRecord(Question):
    """A question to append to the record of an episode."""

    environment: str
    key: str
    asked: Asked


@dataclass(frozen=True, slots=True)
class Reported:
    """A changed report of a busy environment."""

    environment: str
    report: EpisodeReport


@dataclass(frozen=True, slots=True)
class Logged:
    """A warning that was logged on a node."""

    logger: str
    level: int
    text: str


News = Question | Reported | Logged
"""News that a host returns when the run asks for news."""
