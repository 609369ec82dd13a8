"""LLM requests: a code agent's questions, which are a policy's observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, Protocol, Self

from ares_exp.llms.response import LLMResponse

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details")
"""Fields of an assistant message that hold reasoning."""


class Message(dict[str, Any]):
    """One chat message that cannot change: `{"role": …, "content": …}` and whatever else the wire format has.

    A dict, so that it serialises and compares as one. Agents keep appending to and editing their own message lists;
    an observation must stay what it was when it was made.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a message of an LLMRequest cannot change: build a new dict from it")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[Message], tuple[dict[str, Any]]]:
        """Pickles as a plain dict: the default protocol would call `__setitem__`."""
        return Message, (dict(self),)

    def __deepcopy__(self, memo: object) -> Message:
        """Returns itself: vector environments copy observations, and immutable objects need no copy."""
        return self


class FrozenList(tuple[Any, ...]):
    """A tuple whose items are known to be frozen, so that freezing it again costs nothing."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> FrozenList:
        """Returns itself."""
        return self


_FROZEN = frozenset({str, Message, FrozenList, type(None)})


def freeze(value: Any) -> Any:
    """Makes an immutable deep copy of JSON-like `value`: dicts become `Message`, lists become tuples."""
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
    """Where a request of an agent of others came from, and what it had that an `LLMRequest` has not.

    Attributes:
        wire: The wire format that it came by: `"chat_completions"`, `"responses"` or `"messages"`.
        conversation: The conversation that it belongs to: `"main"`, or the name of a sub-agent's or a background
            request's.
        model: The name of the model that was asked for.
        sampling: What the agent's client asked of the engine (bounds, temperature, effort), by names on the wire. The
            request itself has them only where they are forwarded.
        dropped: Names of what could not be carried.
        is_background: Whether it is answered beside the steps of its episode, where somebody is there for that.
    """

    wire: str
    conversation: str = "main"
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=Message)
    dropped: tuple[str, ...] = ()
    is_background: bool = False


def origin_to_dict(origin: Origin) -> Mapping[str, Any]:
    """Makes a JSON-ready dict of an origin, frozen; what is at its default is left out."""
    values = {item.name: getattr(origin, item.name) for item in fields(Origin)}
    defaults = Origin("")
    return Message({name: freeze(value) for name, value in values.items() if value != getattr(defaults, name)})


def origin_from_dict(data: Mapping[str, Any]) -> Origin:
    """Reads back an origin as `origin_to_dict` wrote it; fields of later versions are left out.

    Raises:
        ValueError: It is none.
    """
    texts = {name: data[name] for name in ("wire", "conversation", "model") if name in data}
    dropped, sampling = data.get("dropped", ()), data.get("sampling", Message())
    is_background = data.get("is_background", False)
    are_names = isinstance(dropped, list | tuple) and all(isinstance(name, str) for name in dropped)
    is_origin = are_names and isinstance(sampling, Mapping) and isinstance(is_background, bool)
    if not is_origin or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"Expected the origin of a request, got {data!r:.80}")
    return Origin(
        **{"wire": "", **texts}, sampling=freeze(sampling), dropped=tuple(dropped), is_background=is_background
    )


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """One request to an LLM, independent of any provider's wire format. Immutable, all the way down.

    Attributes:
        messages: The conversation, oldest first: user, assistant and tool messages. System text is `system_prompt`.
        max_output_tokens: Bound on generated tokens, or `None` for the engine's own.
        temperature: Sampling temperature, or `None` for the engine's own; likewise `top_p`, `top_k`.
        stream: Whether the agent asked for a streamed response.
        tools: Tool definitions offered to the model, in the chat-completions form.
        tool_choice: `"auto"`, `"none"`, `"required"` or a mapping that names one tool.
        metadata: Free data of the agent's, never interpreted.
        service_tier: Provider-specific tier name.
        stop_sequences: Strings that end generation.
        system_prompt: The system text, or `None`.
        origin: Where it came from, for the requests of agents that speak HTTP. It is no part of what is asked: requests
            that differ in it alone are equal.
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
        """Returns itself."""
        return self

    def __post_init__(self) -> None:
        """Freezes what is mutable. Messages that are frozen already cost nothing."""
        for name in ("messages", "tools", "tool_choice", "metadata", "stop_sequences"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, freeze(value))


class LLMClient(Protocol):
    """Whatever answers LLM requests. A policy is an `LLMClient`."""

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request.

        Raises:
            PolicyError: No response could be had.
        """
        ...


REQUEST_DEFAULTS: dict[str, Any] = {
    item.name: item.default for item in fields(LLMRequest) if item.name not in ("messages", "origin")
}


@dataclass(frozen=True, slots=True)
class MessageEdit:
    """One change, in every request from a time step on that reaches so far.

    The agent knows nothing of it: what it asks next repeats its own messages, and is shown with the same change.

    Attributes:
        kind: `"insert"` puts a user message before the message at `index`; `"replace"` gives that one another text.
        index: Position in the messages, from 0.
        text: The text.
        step: The first time step whose request is shown so; those before were shown as they were.
    """

    kind: Literal["insert", "replace"]
    index: int
    text: str
    step: int

    def apply(self, request: LLMRequest) -> LLMRequest:
        """Returns the request as the policy sees it."""
        messages = list(request.messages)
        if self.kind == "insert" and self.index <= len(messages):
            messages.insert(self.index, {"role": "user", "content": self.text})
        elif self.kind == "replace" and self.index < len(messages):
            messages[self.index] = {**messages[self.index], "content": self.text}
        return replace(request, messages=messages)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
        return {"kind": self.kind, "index": self.index, "text": self.text, "step": self.step}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads the form of `to_dict`.

        Raises:
            ValueError: It is no such thing.
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
    """Reads the edits that a recorded trajectory was run with; anything else is left out."""
    found = metadata.get("edits")
    edits: list[MessageEdit] = []
    for one in found if isinstance(found, Sequence) else ():
        with suppress(ValueError, AttributeError):
            edits.append(MessageEdit.from_dict(one))
    return tuple(edits)


def edited(request: LLMRequest, edits: Iterable[MessageEdit], step: int) -> LLMRequest:
    """Returns the request of a time step as the policy sees it, or saw it."""
    for edit in edits:
        if edit.step <= step:
            request = edit.apply(request)
    return request
