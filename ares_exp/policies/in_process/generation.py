"""Generation of a batch of rows with a causal model of transformers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.errors import PolicyError
from ares_exp.policies.in_process.sampling import Row, choose


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        model: Module of the model.
        tokenizer: Tokenizer of the model.
        pad: Id of the padding token.
        ends: Ids of the tokens that end a response.
        max_tokens: Length of the model's context; `None` if it is unlimited.
    """

    model: Any
    tokenizer: Any
    pad: int
    ends: frozenset[int]
    max_tokens: int | None

    def text(self, ids: Any) -> str:
        """Returns the text of token ids, including special tokens."""
        made: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return made


Watch = Callable[[Any, Sequence[Row], int], contextlib.AbstractContextManager[None]]
"""Context manager around the generation of a batch. Arguments: module, rows, length of the longest prompt in tokens."""


def generate(loaded: LoadedModel, rows: Sequence[Row], watch: Watch) -> None:
    """Generates rows until they end, and stores the results in them.

    If a batch does not fit into memory, it is split in half.

    Args:
        loaded: Model, whose module is in evaluation mode during the call.
        rows: Rows to generate. An abandoned row ends at its next token.
        watch: Context manager around the generation.

    Raises:
        PolicyError: The model's logits are not numbers, or a single row does not fit into memory.
    """
    import torch

    if not rows:
        return
    try:
        with _as_it_generates(loaded.model, loaded.pad), torch.no_grad():
            _generate(loaded, rows, watch)
        for row in rows:
            row.hand_over()
        return
    except torch.OutOfMemoryError as error:
        if len(rows) == 1:
            raise PolicyError(
                f"A prompt of {len(rows[0].prompt)} tokens and its response do not fit into the memory of "
                f"{loaded.model.device}: {error}"
            ) from None
    left = [row for row in rows if row.finish is None]
    for half in (left[: (len(left) + 1) // 2], left[(len(left) + 1) // 2 :]):  # after the handler, which holds memory
        torch.cuda.empty_cache()
        for row in half:
            row.start_again()
        generate(loaded, half, watch)


def _generate(loaded: LoadedModel, rows: Sequence[Row], watch: Watch) -> None:
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    model, pad = loaded.model, loaded.pad
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row.prompt)) + list(row.prompt) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows], device=model.device)
    stepper = _Stepper(rows, pad, loaded.ends, loaded.text)
    longest = max(row.sampling.max_tokens for row in rows)
    with watch(model, rows, width):
        model.generate(
            ids,
            attention_mask=mask,
            generation_config=GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=pad),
            logits_processor=LogitsProcessorList([stepper.choose]),
            stopping_criteria=StoppingCriteriaList([_Ended(stepper)]),
        )


class _Stepper:
    """Selects the tokens of a batch, instead of the model's own method."""

    def __init__(
        self, rows: Sequence[Row], pad: int, ends: frozenset[int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.rows = rows
        self._pad = pad
        self._ends = ends
        self._decode = decode

    def choose(self, _: Any, logits: Any) -> Any:
        """Selects a token for each running row. Returns scores with the maximum at the selected tokens."""
        tokens, logprobs = choose(logits, self.rows)
        for number, (row, token, logprob) in enumerate(zip(self.rows, tokens, logprobs, strict=True)):
            if row.finish is not None or row.given_up.is_set():
                row.finish = row.finish or "given_up"
                tokens[number] = self._pad
                continue
            if math.isnan(logprob):
                raise PolicyError("The logits of the model are not numbers. Check its weights.")
            row.take(token, logprob, self._ends, self._decode)
        if not all(row.finish for row in self.rows):  # the last rows are returned after the model is restored
            for row in self.rows:
                row.hand_over()
        scores = logits.new_full(logits.shape, -math.inf)
        for number, token in enumerate(tokens):
            scores[number, token] = 0.0
        return scores


class _Ended:
    """Stopping criterion that reports which rows have ended."""

    eos_token_id = None  # required: rows end individually

    def __init__(self, stepper: _Stepper) -> None:
        self._stepper = stepper

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        return torch.tensor([row.finish is not None for row in self._stepper.rows], device=ids.device)


@contextlib.contextmanager
def _as_it_generates(model: Any, pad: int) -> Iterator[None]:
    """Sets evaluation mode and disables the model's own sampling defaults, so that only the given sampling applies."""
    from transformers import GenerationConfig

    defaults, is_training = model.generation_config, model.training
    model.generation_config = GenerationConfig(pad_token_id=pad)
    model.eval()
    try:
        yield
    finally:
        if is_training:
            model.train()
        model.generation_config = defaults
