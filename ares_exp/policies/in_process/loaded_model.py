"""A model in this process. A thread generates one response at a time."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from ares_exp.cancellation import finish, in_thread, result_of
from ares_exp.errors import AresExpError, PolicyError, PolicyTimeoutError
from ares_exp.policies.in_process.activations import StateWatcher
from ares_exp.policies.in_process.chat_template import ChatTemplate
from ares_exp.policies.in_process.sampling import Row, choose
from ares_exp.policies.waiting import OnWait, nobody_waits, reported


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        pad: Id of the padding token.
        ends: Ids of the tokens that end a response.
        max_tokens: Length of the model's context; `None` if it is unlimited.
    """

    model: Any
    template: ChatTemplate
    pad: int
    ends: frozenset[int]
    max_tokens: int | None


@dataclass(eq=False, slots=True)
class _Update:
    version: str
    apply: Callable[[LoadedModel], None]
    error: Exception | None = None


class ModelInProcess:
    """A model that is loaded at its first use, and freed by `close`. Use each instance on only one event loop.

    Attributes:
        version: Version of the weights.
    """

    def __init__(self, load: Callable[[], LoadedModel], *, version: str | None, watcher: StateWatcher) -> None:
        """Stores the arguments. The first use of the model calls `load` in a thread."""
        self.version = version
        self._load = load
        self._watcher = watcher
        self._turns = asyncio.Lock()
        self._model: LoadedModel | None = None
        self._updates: list[_Update] = []
        self._row: Row | None = None
        self._is_closed = False

    async def loaded(self) -> LoadedModel:
        """Returns the model, after loading it if necessary.

        Raises:
            AresExpError: The model could not be loaded.
        """
        if self._model is not None:
            return self._model
        async with self._turn(nobody_waits) as model:
            return model

    async def generate(self, row: Row, *, timeout_sec: float) -> tuple[str | None, Any]:
        """Generates the tokens of a response, and appends them to `row`.

        Returns the version of the weights, and the files of the response's states (`StateWatcher.save`).

        If the caller is cancelled, generation ends at the next token. `timeout_sec` includes the time to wait until
        other responses are complete.

        Raises:
            PolicyError: The response could not be generated.
        """
        try:
            async with asyncio.timeout(timeout_sec), self._turn(row.spec.on_wait) as model:
                self._row = row
                working = asyncio.ensure_future(asyncio.to_thread(self._generated, model, row))
                try:
                    return await result_of(working)
                finally:
                    row.given_up.set()
                    await finish(asyncio.wait_for(working, None))
        except TimeoutError:
            raise PolicyTimeoutError(
                f"The model did not respond within {timeout_sec:g} s. Raise policy.timeout_sec, or lower "
                "policy.max_output_tokens."
            ) from None

    async def update(self, version: str, apply: Callable[[LoadedModel], None]) -> None:
        """Changes the weights as soon as no response is being generated. `apply` receives the model and changes it.

        Responses that wait for the model meanwhile use the new weights.

        Raises:
            AresExpError: `apply` failed.
        """
        update = _Update(version, apply)
        self._updates.append(update)
        async with self._turn(nobody_waits):
            pass
        if update.error is not None:
            raise update.error

    async def close(self) -> None:
        """Ends the response that is being generated, and frees the model. Idempotent."""
        self._is_closed = True
        if self._row is not None:
            self._row.given_up.set()
        async with self._turns:
            self._model = None
        await in_thread(_release)

    @asynccontextmanager
    async def _turn(self, on_wait: OnWait) -> AsyncIterator[LoadedModel]:
        """Gives the caller exclusive use of the model. Loads it if necessary, and applies waiting updates first."""
        with reported(on_wait):
            await self._turns.acquire()
        try:
            if self._is_closed:
                raise PolicyError("The policy is closed.")
            if self._model is None:
                self._model = await in_thread(self._load)
            model = self._model
            if self._updates:
                await in_thread(lambda: self._apply_updates(model))
            yield model
        finally:
            self._turns.release()

    def _apply_updates(self, model: LoadedModel) -> None:
        while self._updates:
            update = self._updates.pop(0)
            try:
                update.apply(model)
            except Exception as error:
                update.error = _as_policy_error(error)
            else:
                self.version = update.version

    def _generated(self, model: LoadedModel, row: Row) -> tuple[str | None, Any]:
        try:
            generate(model, row, self._watcher)
            if row.finish is None:
                raise PolicyError("The policy is closed.")
            return self.version, self._watcher.save(row.spec)
        except Exception as error:
            raise _as_policy_error(error) from None


def _as_policy_error(error: Exception) -> Exception:
    if isinstance(error, AresExpError):
        return error
    return PolicyError(f"The model failed: {type(error).__name__}: {error}")


def _release() -> None:
    import sys

    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate(loaded: LoadedModel, row: Row, watcher: StateWatcher) -> None:
    """Generates tokens and appends them to `row`, until the response ends or the caller gives it up.

    Raises:
        PolicyError: The model's logits contain NaN, or the memory is insufficient.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    model = loaded.model
    ids = torch.tensor([[*row.prompt]], device=model.device)
    longest = GenerationConfig(max_new_tokens=row.sampling.max_tokens, do_sample=False, pad_token_id=loaded.pad)

    def choose_token(_: Any, logits: Any) -> Any:
        """Chooses the next token. Returns scores that make transformers, which decodes greedily, select this token."""
        token, logprob = choose(logits[0], row)
        if math.isnan(logprob):
            raise PolicyError("The logits of the model contain NaN. Check its weights.")
        if not row.given_up.is_set():
            row.take(token, logprob, loaded.ends, loaded.template.decode)
        scores = logits.new_full(logits.shape, -math.inf)
        scores[0, token] = 0.0
        return scores

    def has_ended(*_: Any, **__: Any) -> Any:
        return torch.tensor([row.finish is not None or row.given_up.is_set()], device=model.device)

    try:
        with as_it_generates(model, loaded.pad), torch.no_grad(), watcher.watching(model, row):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=longest,
                logits_processor=LogitsProcessorList([choose_token]),
                stopping_criteria=StoppingCriteriaList([has_ended]),
            )
    except torch.OutOfMemoryError as error:
        raise PolicyError(
            f"A prompt of {len(row.prompt)} tokens and its response do not fit into the memory of {model.device}: "
            f"{error}"
        ) from None


@contextmanager
def as_it_generates(model: Any, pad: int) -> Iterator[None]:
    """Sets evaluation mode, and disables the model's own sampling defaults. Restores both when the context exits."""
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
