"""LLM responses: a policy's responses, i.e. the actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

ORACLE_MODEL = "oracle"
"""The model name in the oracle's responses: what tells its recordings from an LLM's."""


@dataclass(frozen=True, slots=True)
class TextData:
    """A piece of generated text."""

    content: str


@dataclass(frozen=True, slots=True)
class ToolCallData:
    """A call of a tool that the model asks for. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ThinkingData:
    """A piece of reasoning: what the model wrote for itself, kept verbatim. It is no part of `LLMResponse.text`.

    Attributes:
        content: The text, or what the endpoint gave in its place.
        signature: The endpoint's seal of it, to be sent back with it; `None` where there is none.
        redacted: Whether `content` is no text but the endpoint's encrypted form.
    """

    content: str
    signature: str | None = None
    redacted: bool = False


Piece = TextData | ToolCallData | ThinkingData
"""A generated piece of a response."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call, as the engine reported them (0 where it did not).

    Attributes:
        prompt_tokens: Of the request.
        generated_tokens: Of the response, reasoning included.
        cached_tokens: Those of the prompt that the engine read from its cache.
        cache_write_tokens: Those of the prompt that it wrote to its cache.
        reasoning_tokens: Those of the generated ones that are reasoning.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class LLMResponse:
    """One answer of an LLM.

    Attributes:
        data: The generated pieces, in order.
        cost: US dollars for this call; 0.0 when no price is known.
        usage: Token counts.
        prompt_token_ids, completion_token_ids: Token ids, when the engine gave them.
        logprobs: Log-probability of each generated token, when the engine gave them.
        finish_reason: Why generation ended (`"stop"`, `"length"`, …), when the engine said so.
        model: Name of the model that answered, when known.
        latency_sec: Seconds from sending the request to having the whole response, retries included.
        sampling: Sampling parameters that the engine was sent, by their names on the wire, when known.
        policy_version: Version of the weights that generated it, as the engine or the trainer names it, when known.
        activations: Where hidden states of it are kept, by the name of the module: `file` below the run's directory
            (`.npy`), `rows`, and which `positions` they are of.
    """

    data: Sequence[Piece]
    cost: float = 0.0
    usage: Usage = field(default_factory=Usage)
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: str | None = None
    model: str | None = None
    latency_sec: float | None = None
    sampling: Mapping[str, Any] | None = None
    policy_version: str | None = None
    activations: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Turns lists into tuples, so that a response equals the one that is read back from a file."""
        for name in ("data", "prompt_token_ids", "completion_token_ids", "logprobs"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @property
    def text(self) -> str:
        """All text pieces joined, without reasoning."""
        return "".join(piece.content for piece in self.data if isinstance(piece, TextData))

    @property
    def thinking(self) -> tuple[ThinkingData, ...]:
        """The pieces of reasoning, in order."""
        return tuple(piece for piece in self.data if isinstance(piece, ThinkingData))

    @classmethod
    def from_text(cls, text: str, **more: Any) -> LLMResponse:
        """Makes a response of one piece of text."""
        return cls([TextData(text)], **more)


OPTIONAL_RESPONSE_FIELDS = tuple(item.name for item in fields(LLMResponse) if item.default is None)


def piece_to_dict(piece: Piece) -> dict[str, Any]:
    """Makes a JSON-ready dict of a piece: `content`, `thinking`, or `id`, `name` and `arguments` tell what it is."""
    if isinstance(piece, TextData):
        return {"content": piece.content}
    if isinstance(piece, ThinkingData):
        signature = {} if piece.signature is None else {"signature": piece.signature}
        return {"thinking": piece.content, **signature, **({"redacted": True} if piece.redacted else {})}
    return {"id": piece.id, "name": piece.name, "arguments": piece.arguments}


def piece_from_dict(piece: Mapping[str, Any]) -> Piece:
    """Reads back a piece as `piece_to_dict` wrote it.

    Raises:
        ValueError: `piece` is neither text nor reasoning nor a tool call.
    """
    if set(piece) == {"content"}:
        return TextData(piece["content"])
    if set(piece) == {"id", "name", "arguments"}:
        return ToolCallData(piece["id"], piece["name"], piece["arguments"])
    if "thinking" in piece and set(piece) <= {"thinking", "signature", "redacted"}:
        return ThinkingData(piece["thinking"], piece.get("signature"), piece.get("redacted") is True)
    raise ValueError(f"Expected a text piece, reasoning or a tool call, got keys {sorted(piece)}")


def usage_to_dict(usage: Usage) -> dict[str, int]:
    """Makes a JSON-ready dict of token counts; those that few endpoints report are left out where they are 0."""
    more = ("cached_tokens", "cache_write_tokens", "reasoning_tokens")
    counts = {"prompt_tokens": usage.prompt_tokens, "generated_tokens": usage.generated_tokens}
    return counts | {name: count for name in more if (count := getattr(usage, name))}
