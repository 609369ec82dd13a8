"""Recomputed log-probabilities of sequences, for comparison with the values that were recorded at sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ares_exp.training.sequences import TrainingSequence


def largest_gap(
    model: Any, rows: Sequence[TrainingSequence], *, pad: int, temperature: float = 1.0, batch_size: int = 8
) -> float:
    """Returns the largest absolute difference between recorded and recomputed log-probabilities of trained tokens.

    The rows of a batch are padded on the left, as trainers pad prompts.

    Args:
        model: A causal model of transformers, in evaluation mode or without dropout.
        rows: The rows. Only their `ids`, `mask` and `logprobs` are used.
        pad: Id of the padding token.
        temperature: Sampling temperature of the tokens.
        batch_size: Number of rows per forward pass.
    """
    import torch

    gaps = [0.0]
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        longest = max(len(row.ids) for row in batch)
        ids = torch.tensor([[pad] * (longest - len(row.ids)) + [*row.ids] for row in batch], device=model.device)
        seen = torch.tensor([[0] * (longest - len(row.ids)) + [1] * len(row.ids) for row in batch], device=model.device)
        places = (seen.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=seen, position_ids=places).logits[:, :-1].float()
            found = torch.log_softmax(logits / temperature, -1).gather(-1, ids[:, 1:, None])[..., 0]
        for row, values in zip(batch, found.tolist(), strict=True):
            again = (0.0, *values[len(values) - len(row.ids) + 1 :])
            sampled = zip(row.mask, row.logprobs, again, strict=True)
            gaps += [abs(then - now) for is_trained, then, now in sampled if is_trained]
    return max(gaps)
