"""LLM requests: the requests of a code agent, which are the observations of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, Protocol, Self

from ares_exp.llms.response import LLMResponse

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details")
"""Fields of an assistant message that contain reasoning."""


class Message(dict[str, Any]):
    """One immutable chat message: `{"role": …, "content": …}` and other fields of the wire format.

    A message is a dict, so that it can be serialised and compared like a dict. It is immutable, because an observation
    must not change when its agent modifies the list of messages.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the messages of an LLMRequest are immutable: create a new dict instead")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[Message], tuple[dict[str, Any]]]:
        """Pickles the message as a plain dict. The default protocol would call `__setitem__`, which is forbidden."""
        return Message, (dict(self),)

    def __deepcopy__(self, memo: object) -> Message:
        """Returns the message itself, so that vector environments, which copy observations, do not copy messages."""
        return self


class FrozenList(tuple[Any, ...]):
    """An immutable list of immutable items, created by `freeze`. `freeze` returns such a list unchanged."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> FrozenList:
        """Returns the list itself, because it is immutable."""
        return self


_FROZEN = frozenset({str, int, float, bool, Message, FrozenList, type(None)})


def freeze(value: Any) -> Any:
    """Returns an immutable deep copy of JSON-like `value`. Dicts become `Message`s, and lists become `FrozenList`s."""
    if type(value) in _FROZEN:
        return value
    if isinstance(value, Mapping):
        return Message({str(key): item if type(item) in _FROZEN else freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList([item if type(item) in _FROZEN else freeze(item) for item in value])
    if isinstance(value, str | int | float):
        return value
    raise TypeError(f"Expected JSON-like data, got {type(value).__name__}: {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Data from a third-party agent's HTTP request that is not part of the converted `LLMRequest`.

    Attributes:
        wire: Wire format of the request: `"chat_completions"`, `"responses"`, `"messages"` or `"generate_content"`.
        conversation: Name of the conversation: `"main"`, or the name of a subagent's or a background conversation.
        model: Requested model name.
        sampling: Sampling parameters of the HTTP request (token limit, temperature, …), by their names in its API. The
            fields of the `LLMRequest` contain them only if the agent's `forward_sampling` is set.
        dropped: Names of the parts of the HTTP request that could not be converted.
        is_background: Whether this is a background request: the policy responds to it, but it is not a step of the
            episode. Not all environments support background requests.
    """

    wire: str
    conversation: str = "main"
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=Message)
    dropped: tuple[str, ...] = ()
    is_background: bool = False


def origin_to_dict(origin: Origin) -> Mapping[str, Any]:
    """Converts an origin to a frozen JSON-ready dict. Default values are omitted."""
    values = {item.name: getattr(origin, item.name) for item in fields(Origin)}
    defaults = Origin("")
    return Message({name: freeze(value) for name, value in values.items() if value != getattr(defaults, name)})


def origin_from_dict(data: Mapping[str, Any]) -> Origin:
    """Converts the result of `origin_to_dict` to an origin. Ignores fields of later versions of this package.

    Raises:
        ValueError: `data` is not a valid origin.
    """
    given = {item.name: data[item.name] for item in fields(Origin) if item.name in data}
    origin = Origin(**{"wire": "", **given})
    is_valid = (
        all(isinstance(text, str) for text in (origin.wire, origin.conversation, origin.model))
        and isinstance(origin.dropped, list | tuple)
        and all(isinstance(name, str) for name in origin.dropped)
        and isinstance(origin.sampling, Mapping)
        and isinstance(origin.is_background, bool)
    )
    if not is_valid:
        raise ValueError(f"Expected valid fields in the `origin` of a request, got {data!r:.80}")
    return replace(origin, sampling=freeze(origin.sampling), dropped=tuple(origin.dropped))


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """One immutable request to an LLM, independent of any provider's wire format.

    Attributes:
        messages: Conversation in order: user, assistant and tool messages. System text is in `system_prompt`.
        max_output_tokens: Maximum number of generated tokens; `None` for the engine's default.
        temperature: Sampling temperature; `None` for the engine's default. `None` has the same meaning for `top_p` and
            `top_k`.
        stream: Whether the agent requested a streamed response.
        tools: Definitions of the offered tools, in the chat-completions format.
        tool_choice: `"auto"`, `"none"`, `"required"` or a mapping that names one tool.
        metadata: Arbitrary data from the agent. This package does not interpret it.
        service_tier: Name of the provider's service tier.
        stop_sequences: Strings that end generation.
        system_prompt: System text, or `None`.
        origin: Origin of the request, for agents that use HTTP. Ignored when requests are compared.
    """

    messages: Sequence[Mapping[str, Any]]
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: Sequence[str] | None = None
    system_prompt: str | None = None
    top_k: int | None = None
    origin: Origin | None = field(default=None, compare=False)

    def __deepcopy__(self, memo: object) -> LLMRequest:
        """Returns the request itself, because it is immutable."""
        return self

    def __post_init__(self) -> None:
        """Replaces lists and dicts by immutable copies. Messages that are already immutable are not copied."""
        for name in ("messages", "tools", "tool_choice", "metadata", "stop_sequences"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, freeze(value))


class LLMClient(Protocol):
    """A client that responds to LLM requests. A policy is an `LLMClient`."""

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request.

        Raises:
            PolicyError: The client could not get a response.
        """


REQUEST_DEFAULTS: dict[str, Any] = {
    item.name: item.default for item in fields(LLMRequest) if item.name not in ("messages", "origin")
}


@dataclass(frozen=True, slots=True)
class MessageEdit:
    """A change of the messages that a policy receives in all requests of an episode, from one time step on.

    The agent does not see the change: its later requests contain the original messages, and are changed again. A
    request that has no message at `index` is not changed.

    Attributes:
        kind: `"insert"` adds a user message before the message at `index`, and `"replace"` changes the text of the
            message at `index`.
        index: Position in the messages, starting at 0.
        text: Text of the message.
        step: Number of the first time step whose request is changed.
    """

    kind: Literal["insert", "replace"]
    index: int
    text: str
    step: int

    def apply(self, request: LLMRequest) -> LLMRequest:
        """Returns the request with the edited messages, which the policy receives instead of the agent's request."""
        messages = list(request.messages)
        if self.kind == "insert" and self.index <= len(messages):
            messages.insert(self.index, {"role": "user", "content": self.text})
        elif self.kind == "replace" and self.index < len(messages):
            messages[self.index] = {**messages[self.index], "content": self.text}
        return replace(request, messages=messages)

    def to_dict(self) -> dict[str, Any]:
        """Returns the edit as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Converts the result of `to_dict` to an edit.

        Raises:
            ValueError: `data` is not a valid edit.
        """
        kind, index, text, step = (data.get(name) for name in ("kind", "index", "text", "step"))
        if (
            kind not in ("insert", "replace")
            or not (isinstance(index, int) and index >= 0)
            or not isinstance(text, str)
            or not (isinstance(step, int) and step >= 0)
        ):
            raise ValueError(f"expected kind, index, text and step of a message edit, got {data!r:.100}")
        return cls(kind, index, text, step)


def recorded_edits(metadata: Mapping[str, Any]) -> tuple[MessageEdit, ...]:
    """Returns the edits from the metadata of a recorded trajectory. Ignores invalid edits."""
    found = metadata.get("edits")
    edits: list[MessageEdit] = []
    for one in found if isinstance(found, Sequence) else ():
        with suppress(ValueError, AttributeError):
            edits.append(MessageEdit.from_dict(one))
    return tuple(edits)


def edited(request: LLMRequest, edits: Iterable[MessageEdit], step: int) -> LLMRequest:
    """Returns the request of time step `step` after all edits that start at this step or earlier."""
    for edit in edits:
        if edit.step <= step:
            request = edit.apply(request)
    return request
