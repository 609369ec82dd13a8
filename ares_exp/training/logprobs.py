"""Recomputed log-probabilities of sequences, for comparison with the values that were recorded at sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class SampledRow(Protocol):
    """The fields of a row that are compared. Both a `TrainingSequence` and a trainer's own row have these fields."""

    @property
    def ids(self) -> Sequence[int]:
        """All tokens."""
        ...

    @property
    def mask(self) -> Sequence[int]:
        """1 for each token that was sampled and is trained on, otherwise 0."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Log-probability of each token when it was sampled. Ignored where the mask is 0."""
        ...


def recomputed(
    model: Any, rows: Sequence[SampledRow], *, pad: int, temperature: float = 1.0, batch_size: int = 8
) -> list[tuple[float, ...]]:
    """Computes the log-probability of every token of every row. The first token of a row has 0.0.

    The rows of a batch are padded on the left, as trainers pad prompts.

    Args:
        model: A causal model of transformers, in evaluation mode or without dropout.
        rows: The rows.
        pad: Id of the padding token.
        temperature: Sampling temperature of the tokens.
        batch_size: Number of rows per forward pass.
    """
    batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    return [one for batch in batches for one in _of_batch(model, batch, pad, temperature)]


def _of_batch(model: Any, rows: Sequence[SampledRow], pad: int, temperature: float) -> Iterator[tuple[float, ...]]:
    import torch

    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row.ids)) + [*row.ids] for row in rows], device=model.device)
    seen = torch.tensor([[0] * (longest - len(row.ids)) + [1] * len(row.ids) for row in rows], device=model.device)
    places = (seen.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=seen, position_ids=places).logits[:, :-1].float()
        found = torch.log_softmax(logits / temperature, -1).gather(-1, ids[:, 1:, None])[..., 0]
    for row, values in zip(rows, found.tolist(), strict=True):
        yield (0.0, *values[len(values) - len(row.ids) + 1 :])


def largest_gap(
    model: Any, rows: Sequence[SampledRow], *, pad: int, temperature: float = 1.0, batch_size: int = 8
) -> float:
    """Returns the largest absolute difference between recorded and recomputed log-probabilities of trained tokens."""
    again = recomputed(model, rows, pad=pad, temperature=temperature, batch_size=batch_size)
    return max(
        (
            abs(then - now)
            for row, values in zip(rows, again, strict=True)
            for trained, then, now in zip(row.mask, row.logprobs, values, strict=True)
            if trained
        ),
        default=0.0,
    )
