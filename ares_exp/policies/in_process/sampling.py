"""Sampling of one response, and the rows of a batch: each with draws, bounds and a stop of its own.

A row is drawn by inverse transform: one uniform number of the row's own sequence for each token, looked up in the
cumulated probabilities. What else is in the batch changes nothing but the rounding of the logits.
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
DEFAULT_MAX_OUTPUT_TOKENS = 2048
"""Bound on a response where neither the policy nor the agent sets one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is sampled.

    Attributes:
        max_tokens: Bound on the generated tokens.
        temperature: 0 takes the likeliest token.
        top_p: Nucleus; 1 is everything.
        top_k: So many likeliest; `None` is everything.
        stop: Strings that end generation.
        seed: Names the sequence of draws.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: Sequence[str] = ()
    seed: str = "0"

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form, by the names that endpoints use; what is neutral is left out."""
        more: dict[str, Any] = {"top_k": self.top_k, "stop": list(self.stop) or None}
        fixed = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return fixed | {name: value for name, value in more.items() if value is not None}


@dataclass(eq=False, slots=True)
class Row:
    """One answer that is being generated.

    Attributes:
        prompt: Ids of the prompt.
        sampling: How it is sampled.
        ids: Ids that were sampled so far, the one that ended it included.
        logprobs: Log-probability of each of them, at the row's temperature, over the whole vocabulary.
        finish: Why it ended; `None` while it goes on.
        given_up: Whether nobody waits for it any more.
        tag: What the owner of the row knows it by.
        on_end: Is called in the model's thread, once, when the row has ended, unless it was given up.
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
        """Starts the sequence of draws."""
        self._draws = random.Random(self.sampling.seed)

    def start_again(self) -> None:
        """Forgets what was generated, as when a batch did not fit into memory; a row that has ended stays."""
        if self.finish is None:
            self.ids, self.logprobs, self._draws = [], [], random.Random(self.sampling.seed)

    def hand_over(self) -> None:
        """Calls `on_end`, where the row has ended and nobody was told yet."""
        if self.finish in ("stop", "length") and not self._is_handed_over:
            self._is_handed_over = True
            self.on_end()

    def draw(self) -> float:
        """Returns the next number of the row's sequence, from 0 to below 1."""
        return self._draws.random()

    def take(self, token: int, logprob: float, ends: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        """Adds a token, and finds out whether it was the last one."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in ends or self._has_stop(decode):
            self.finish = "stop"
        elif len(self.ids) >= self.sampling.max_tokens:
            self.finish = "length"

    def _has_stop(self, decode: Callable[[Sequence[int]], str]) -> bool:
        """Tells whether a stop string ends among the last tokens: of each token at least one byte is text."""
        if not self.sampling.stop:
            return False
        longest = max(len(stop.encode()) for stop in self.sampling.stop)
        tail = decode(self.ids[-(longest + 4) :])
        return any(stop in tail for stop in self.sampling.stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns what stands before the first of the stop strings."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text


def choose(logits: Any, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Chooses the next token of each row.

    Args:
        logits: Of the model, a row each, in float32.
        rows: The rows; those that have ended are given a token, too, and draw nothing.

    Returns:
        The ids, and their log-probabilities; a NaN where the model gave no distribution.
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
    """Returns the log-probabilities with those tokens at minus infinity that a row's `top_k` and `top_p` leave out."""
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
    """Returns for each row the first token at which the cumulated probability exceeds the row's draw."""
    import torch

    if logprobs.device.type == "mps":  # which has no float64
        logprobs = logprobs.cpu()
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    total = cumulated[:, -1:]
    wanted = torch.tensor(draws, dtype=torch.float64, device=cumulated.device)[:, None] * total
    last = (cumulated < total).sum(dim=-1)  # the first that reaches the total: behind it nothing has a probability
    found: Any = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return torch.minimum(found, last)
