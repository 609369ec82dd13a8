"""Recomputed log-probabilities of sequences, for comparison with those that were recorded at sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ares_exp.training.sequences import TrainingSequence


def recomputed(
    model: Any, rows: Sequence[TrainingSequence], *, pad: int, temperature: float = 1.0, batch_size: int = 8
) -> list[tuple[float, ...]]:
    """Computes the log-probability of every token of every row; 0.0 for the first, which follows nothing.

    Rows of a batch are padded on the left, as trainers pad prompts.

    Args:
        model: A causal model of transformers, in evaluation mode or without dropout.
        rows: The rows.
        pad: Id of the padding.
        temperature: That the tokens were sampled at.
        batch_size: Rows at once.
    """
    batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    return [one for batch in batches for one in _of_batch(model, batch, pad, temperature)]


def _of_batch(
    model: Any, rows: Sequence[TrainingSequence], pad: int, temperature: float
) -> Iterator[tuple[float, ...]]:
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
    model: Any, rows: Sequence[TrainingSequence], *, pad: int, temperature: float = 1.0, batch_size: int = 8
) -> float:
    """Returns the largest difference between recorded and recomputed log-probabilities of the tokens trained on."""
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
