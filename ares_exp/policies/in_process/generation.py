"""Generation of one response (a row) with a causal model of transformers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ares_exp.errors import PolicyError
from ares_exp.policies.in_process.activations import StateWatcher
from ares_exp.policies.in_process.chat_template import ChatTemplate
from ares_exp.policies.in_process.sampling import Row, choose


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        model: Module of the model.
        template: Chat template of the model's tokenizer.
        pad: Id of the padding token.
        ends: Ids of the tokens that end a response.
        max_tokens: Length of the model's context; `None` if it is unlimited.
    """

    model: Any
    template: ChatTemplate
    pad: int
    ends: frozenset[int]
    max_tokens: int | None


def generate(loaded: LoadedModel, row: Row, watcher: StateWatcher) -> None:
    """Generates a row until it ends or is abandoned, and stores the result in it.

    Args:
        loaded: Model, whose module is in evaluation mode during the call.
        row: Row to generate. An abandoned row ends at its next token.
        watcher: Watcher of the states during generation.

    Raises:
        PolicyError: The model's logits are not numbers, or the row does not fit into memory.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    model = loaded.model
    ids = torch.tensor([[*row.prompt]], device=model.device)
    longest = GenerationConfig(max_new_tokens=row.sampling.max_tokens, do_sample=False, pad_token_id=loaded.pad)

    def choose_token(_: Any, logits: Any) -> Any:
        """Chooses the token, and returns scores that make transformers' greedy decoding select it."""
        token, logprob = choose(logits[0], row)
        if math.isnan(logprob):
            raise PolicyError("The logits of the model are not numbers. Check its weights.")
        if not row.given_up.is_set():
            row.take(token, logprob, loaded.ends, loaded.template.decode)
        scores = logits.new_full(logits.shape, -math.inf)
        scores[0, token] = 0.0
        return scores

    try:
        with as_it_generates(model, loaded.pad), torch.no_grad(), watcher.watching(model, row):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=longest,
                logits_processor=LogitsProcessorList([choose_token]),
                stopping_criteria=StoppingCriteriaList([_Ended(row)]),
            )
    except torch.OutOfMemoryError as error:
        raise PolicyError(
            f"A prompt of {len(row.prompt)} tokens and its response do not fit into the memory of {model.device}: "
            f"{error}"
        ) from None


@dataclass(slots=True)
class _Ended:
    """Stopping criterion that reports whether a row has ended or was abandoned."""

    row: Row

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        return torch.tensor([self.row.finish is not None or self.row.given_up.is_set()], device=ids.device)


@contextlib.contextmanager
def as_it_generates(model: Any, pad: int) -> Iterator[None]:
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
