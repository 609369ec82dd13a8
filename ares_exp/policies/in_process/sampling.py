"""Sampling of one response, and the rows of a batch, each with its own random sequence, limits and stop strings.

Tokens are sampled by inverse transform: for each token, one uniform number of the row's random sequence is looked up in
the cumulative probabilities. The other rows of the batch affect only the rounding of the logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

NEUTRAL_SAMPLING: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Values that leave the model's distribution unchanged."""
PROCESSED_LOGPROBS: Mapping[str, str] = {"logprobs_mode": "processed_logprobs"}
"""Recorded with the sampling of a response whose log-probabilities are those of its temperature."""
DEFAULT_MAX_OUTPUT_TOKENS = 2048
"""Maximum length of a response if neither the policy nor the agent sets one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one response.

    Attributes:
        max_tokens: Maximum number of generated tokens.
        temperature: Sampling temperature; 0 selects the most likely token.
        top_p: Threshold for nucleus sampling; 1 keeps all tokens.
        top_k: Number of most likely tokens to sample from; `None` keeps all tokens.
        stop: Strings that end generation.
        seed: Seed of the random sequence.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: Sequence[str] = ()
    seed: str = "0"

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready data with the names that endpoints use. Unset values of `top_k` and `stop` are omitted."""
        more: dict[str, Any] = {"top_k": self.top_k, "stop": list(self.stop) or None}
        fixed = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return fixed | {name: value for name, value in more.items() if value is not None}


@dataclass(eq=False, slots=True)
class Row:
    """One response during its generation.

    Attributes:
        prompt: Token ids of the prompt.
        sampling: Sampling parameters.
        ids: Token ids sampled so far, including the one that ended the response.
        logprobs: Log-probability of each sampled token over the whole vocabulary, at the row's temperature.
        finish: Reason for the end; `None` while the row is running.
        given_up: Event that is set when no caller waits for the row.
        tag: Identifier for the owner of the row.
        on_end: Callback in the model's thread, called once when the row has ended, unless the row was abandoned.
    """

    prompt: Sequence[int]
    sampling: Sampling
    tag: Any = None
    on_end: Callable[[], None] = lambda: None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    given_up: Event = field(default_factory=Event)
    _draws: random.Random = field(init=False)
    _is_handed_over: bool = False

    def __post_init__(self) -> None:
        """Starts the random sequence."""
        self._draws = random.Random(self.sampling.seed)

    def start_again(self) -> None:
        """Discards the generated tokens, for example if a batch did not fit into memory.

        Finished rows are not changed.
        """
        if self.finish is None:
            self.ids, self.logprobs, self._draws = [], [], random.Random(self.sampling.seed)

    def hand_over(self) -> None:
        """Calls `on_end` if the row has ended and the callback has not run yet."""
        if self.finish in ("stop", "length") and not self._is_handed_over:
            self._is_handed_over = True
            self.on_end()

    def draw(self) -> float:
        """Returns the next number of the row's random sequence, in [0, 1)."""
        return self._draws.random()

    def take(self, token: int, logprob: float, ends: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        """Appends a token, and sets `finish` if it was the last one."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in ends or self._has_stop(decode):
            self.finish = "stop"
        elif len(self.ids) >= self.sampling.max_tokens:
            self.finish = "length"

    def _has_stop(self, decode: Callable[[Sequence[int]], str]) -> bool:
        """Returns whether a stop string ends within the last tokens. Each token has at least one byte of text."""
        if not self.sampling.stop:
            return False
        longest = max(len(stop.encode()) for stop in self.sampling.stop)
        tail = decode(self.ids[-(longest + 4) :])
        return any(stop in tail for stop in self.sampling.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text


def choose(logits: Any, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Selects the next token of each row.

    Args:
        logits: Logits of the model in float32, one row per row of the batch.
        rows: Rows of the batch. Finished rows also get a token, but use no random number.

    Returns:
        Token ids and their log-probabilities, which are NaN if the model's logits are not numbers.
    """
    import torch

    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    scaled = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    draws = [0.0 if row.finish or not row.sampling.temperature else row.draw() for row in rows]
    tokens = _inverse(_truncated(logprobs, rows), draws)
    greedy = [not row.sampling.temperature for row in rows]
    if any(greedy):
        tokens = torch.where(
            torch.tensor(greedy, device=tokens.device), logits.argmax(dim=-1).to(tokens.device), tokens
        )
    chosen = logprobs.gather(1, tokens.to(logprobs.device)[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def _truncated(logprobs: Any, rows: Sequence[Row]) -> Any:
    """Returns the log-probabilities, set to minus infinity for tokens that a row's `top_k` and `top_p` exclude."""
    if all(row.sampling.top_k is None and row.sampling.top_p >= 1 for row in rows):
        return logprobs
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    kept = logprobs.clone()
    for number, row in enumerate(rows):
        one = kept[number : number + 1]
        if row.sampling.top_k is not None:
            one = TopKLogitsWarper(row.sampling.top_k)(None, one)
        if row.sampling.top_p < 1:
            one = TopPLogitsWarper(row.sampling.top_p)(None, one)
        kept[number] = one[0]
    return kept


def _inverse(logprobs: Any, draws: Sequence[float]) -> Any:
    """Returns, for each row, the first token whose cumulative probability exceeds the row's random number."""
    import torch

    if logprobs.device.type == "mps":  # mps has no float64
        logprobs = logprobs.cpu()
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    total = cumulated[:, -1:]
    wanted = torch.tensor(draws, dtype=torch.float64, device=cumulated.device)[:, None] * total
    last = (cumulated < total).sum(dim=-1)  # the last token with a probability above 0
    found: Any = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return torch.minimum(found, last)
