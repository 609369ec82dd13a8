"""Sampling of one response, with its own random sequence, limits and stop strings.

Tokens are sampled by inverse transform sampling: for each token, one uniform random number is looked up in the
cumulative probabilities of the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from threading import Event
from typing import Any

from ares_exp.policies.policy import EpisodeSpec

NEUTRAL_SAMPLING: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Values of sampling parameters that leave the model's distribution unchanged."""
PROCESSED_LOGPROBS: Mapping[str, str] = {"logprobs_mode": "processed_logprobs"}
"""Entry of `LLMResponse.sampling` which states that the log-probabilities refer to the sampling temperature."""
DEFAULT_MAX_OUTPUT_TOKENS = 2048
"""Maximum number of tokens of a response if neither the policy nor the agent sets it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one response.

    Attributes:
        max_tokens: Maximum number of generated tokens.
        temperature: Sampling temperature; 0 selects the most likely token.
        top_p: Threshold for nucleus sampling; 1 keeps all tokens.
        top_k: Number of most likely tokens to sample from; `None` keeps all tokens.
        stop: Strings that end generation.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the parameters that are set, as JSON-ready data with the names that endpoints use for them."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != []}


@dataclass(eq=False, slots=True)
class Row:
    """One response that is being generated.

    Attributes:
        draws: Random generator that selects the tokens.
        ids: Token ids sampled so far, including the token that ended the response.
        logprobs: Log-probability of each sampled token over the whole vocabulary, at the row's temperature.
        finish: Reason why the response ended: `stop` or `length`. `None` while it is incomplete.
        given_up: Event that stops the generation. It is set when the caller no longer waits for the response.
    """

    prompt: Sequence[int]
    sampling: Sampling
    spec: EpisodeSpec
    draws: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    given_up: Event = field(default_factory=Event)

    def take(self, token: int, logprob: float, ends: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        """Appends a token. Sets `finish` if it ends the response.

        A response ends with a token in `ends`, a stop string, or the maximum number of tokens. `decode` converts token
        ids to text, to find stop strings.
        """
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in ends or self._has_stop(decode):
            self.finish = "stop"
        elif len(self.ids) >= self.sampling.max_tokens:
            self.finish = "length"

    def _has_stop(self, decode: Callable[[Sequence[int]], str]) -> bool:
        """Returns whether the last tokens contain a stop string.

        Decodes only as many tokens as the longest stop string has bytes, and a few more, because each token has at
        least one byte.
        """
        if not self.sampling.stop:
            return False
        longest = max(len(stop.encode()) for stop in self.sampling.stop)
        tail = decode(self.ids[-(longest + 4) :])
        return any(stop in tail for stop in self.sampling.stop)


def choose(logits: Any, row: Row) -> tuple[int, float]:
    """Returns the next token and its log-probability (NaN if a logit is NaN). `logits` has one float32 per token."""
    import torch

    temperature = row.sampling.temperature
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    token = _inverse(_truncated(logprobs, row.sampling), row.draws.random()) if temperature else int(logits.argmax())
    return token, float(logprobs[token])


def _truncated(logprobs: Any, sampling: Sampling) -> Any:
    """Returns the log-probabilities, with minus infinity for each token that `top_k` or `top_p` excludes."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    kept = logprobs[None]
    if sampling.top_k is not None:
        kept = TopKLogitsWarper(sampling.top_k)(None, kept)
    if sampling.top_p < 1:
        kept = TopPLogitsWarper(sampling.top_p)(None, kept)
    return kept[0]


def _inverse(logprobs: Any, draw: float) -> int:
    """Returns the first token whose cumulative probability exceeds `draw`, a random number in [0, 1)."""
    import torch

    if logprobs.device.type == "mps":  # mps has no float64
        logprobs = logprobs.cpu()
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    last = int((cumulated < cumulated[-1]).sum())  # the last token with a probability above 0
    return min(int(torch.searchsorted(cumulated, draw * cumulated[-1:], right=True)), last)
