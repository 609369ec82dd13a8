"""LLM responses, which are the actions of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

ORACLE_MODEL = "oracle"
"""Model name in the oracle's responses. It distinguishes recordings of the oracle from recordings of an LLM."""


@dataclass(frozen=True, slots=True)
class TextData:
    """A piece of generated text."""

    content: str


@dataclass(frozen=True, slots=True)
class ToolCallData:
    """A tool call that the model requests. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ThinkingData:
    """A piece of reasoning, as the endpoint returned it. `LLMResponse.text` does not include reasoning.

    Attributes:
        content: Text of the reasoning, or the encrypted form from the endpoint (see `redacted`).
        signature: Signature from the endpoint, which later requests send back with the content; `None` if there is no
            signature.
        redacted: Whether `content` is encrypted, and not a text.
    """

    content: str
    signature: str | None = None
    redacted: bool = False


Piece = TextData | ToolCallData | ThinkingData
"""A generated piece of a response: text, a tool call or reasoning."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call, as reported by the engine. A count that was not reported is 0.

    Attributes:
        prompt_tokens: Number of tokens in the request.
        generated_tokens: Number of tokens in the response, including reasoning.
        cached_tokens: Number of prompt tokens that the engine read from its cache.
        cache_write_tokens: Number of prompt tokens that the engine wrote to its cache.
        reasoning_tokens: Number of generated tokens that are reasoning.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Sum of prompt tokens and generated tokens."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class LLMResponse:
    """One response from an LLM.

    Attributes:
        data: Generated pieces in order.
        cost: Cost of this call in US dollars; 0.0 if no price is known.
        usage: Token counts.
        prompt_token_ids, completion_token_ids: Token ids, if the engine returned them.
        logprobs: Log-probability of each generated token, if the engine returned them.
        finish_reason: Reason for the end of generation (`"stop"`, `"length"`, …), if the engine reported it.
        model: Name of the model that responded, if known.
        latency_sec: Seconds from the first attempt to send the request until the complete response, including retries.
        sampling: Sampling parameters that were sent to the engine, by their names in its API, if known.
        policy_version: Version of the weights that generated the response, as named by the engine or trainer, if known.
        policy_version_from: Source of `policy_version`: `body`, `header` or `metadata` (of the endpoint's response),
            `announced` (by a trainer), or `policy` (its settings or updates). `None` if the source is unknown.
        activations: Files of saved hidden states, by module name. Each entry has the path of the `.npy` `file` relative
            to the run's directory, the number of `rows`, and the token `positions` of the rows.
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
    policy_version_from: str | None = None
    activations: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Converts lists to tuples, so that a response equals its copy that was read from a file."""
        for name in ("data", "prompt_token_ids", "completion_token_ids", "logprobs"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @property
    def text(self) -> str:
        """Joined text pieces, without reasoning."""
        return "".join(piece.content for piece in self.data if isinstance(piece, TextData))

    @property
    def thinking(self) -> tuple[ThinkingData, ...]:
        """Pieces of reasoning, in order."""
        return tuple(piece for piece in self.data if isinstance(piece, ThinkingData))

    @classmethod
    def from_text(cls, text: str, **more: Any) -> LLMResponse:
        """Returns a response with one text piece. `more` contains its other fields."""
        return cls([TextData(text)], **more)


OPTIONAL_RESPONSE_FIELDS = tuple(item.name for item in fields(LLMResponse) if item.default is None)


def piece_to_dict(piece: Piece) -> dict[str, Any]:
    """Converts a piece to a JSON-ready dict.

    Its keys (`content`, `thinking`, or `id`, `name`, `arguments`) identify the type.
    """
    if isinstance(piece, TextData):
        return {"content": piece.content}
    if isinstance(piece, ThinkingData):
        signature = {} if piece.signature is None else {"signature": piece.signature}
        return {"thinking": piece.content, **signature, **({"redacted": True} if piece.redacted else {})}
    return {"id": piece.id, "name": piece.name, "arguments": piece.arguments}


def piece_from_dict(piece: Mapping[str, Any]) -> Piece:
    """Converts the result of `piece_to_dict` to a piece.

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
    """Converts token counts to a JSON-ready dict. Omits counts of cached and reasoning tokens if they are 0."""
    more = ("cached_tokens", "cache_write_tokens", "reasoning_tokens")
    counts = {"prompt_tokens": usage.prompt_tokens, "generated_tokens": usage.generated_tokens}
    return counts | {name: count for name in more if (count := getattr(usage, name))}
