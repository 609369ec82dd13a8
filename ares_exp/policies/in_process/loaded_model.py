"""A model in this process, which generates one response at a time, in a thread."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ares_exp.cancellation import finish, in_thread
from ares_exp.errors import AresExpError, PolicyError, PolicyTimeoutError
from ares_exp.policies.in_process.activations import StateWatcher
from ares_exp.policies.in_process.generation import LoadedModel, generate
from ares_exp.policies.in_process.sampling import Row
from ares_exp.policies.waiting import OnWait, nobody_waits, reported


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished row.

    Attributes:
        version: Version of the weights that generated the row.
        kept: Locations of the saved states; see `StateWatcher.links`.
    """

    version: str | None
    kept: Any


@dataclass(eq=False, slots=True)
class _Update:
    version: str
    apply: Callable[[LoadedModel], None]
    error: Exception | None = None


class ModelInProcess:
    """A model that is loaded at its first use and freed by `close`. Must be used on one event loop.

    Attributes:
        version: Version of the weights.
    """

    def __init__(self, load: Callable[[], LoadedModel], *, version: str | None, watcher: StateWatcher) -> None:
        """Stores the settings. The first use loads the model.

        Args:
            load: Function that loads the model, called in a thread.
            version: Version of the model's weights.
            watcher: Watcher of the states during generation.
        """
        self.version = version
        self._load = load
        self._watcher = watcher
        self._turns = asyncio.Lock()
        self._model: LoadedModel | None = None
        self._updates: list[_Update] = []
        self._row: Row | None = None
        self._is_closed = False

    async def loaded(self) -> LoadedModel:
        """Returns the model.

        Raises:
            AresExpError: The model could not be loaded.
        """
        if self._model is not None:
            return self._model
        async with self._turn(nobody_waits) as model:
            return model

    async def generate(self, row: Row, *, timeout_sec: float, on_wait: OnWait) -> Ended:
        """Generates a row until it ends. If the caller is cancelled, the row ends at its next token.

        Args:
            row: Row to generate.
            timeout_sec: Time limit in seconds, including the wait for other rows.
            on_wait: Callback for the seconds that the row waits for other rows.

        Raises:
            PolicyError: The row could not be generated.
        """
        try:
            async with asyncio.timeout(timeout_sec), self._turn(on_wait) as model:
                self._row = row
                working = asyncio.ensure_future(asyncio.to_thread(self._generated, model, row))
                try:
                    return await asyncio.shield(working)
                finally:
                    row.given_up.set()
                    await finish(asyncio.wait({working}))
        except TimeoutError:
            raise PolicyTimeoutError(
                f"The model gave no response within {timeout_sec:g} s: raise policy.timeout_sec, or lower "
                "policy.max_output_tokens."
            ) from None

    async def update(self, version: str, apply: Callable[[LoadedModel], None]) -> None:
        """Changes the weights when no row is running. Waiting rows are generated with the new weights.

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
        """Ends the running row, and frees the model. Idempotent."""
        self._is_closed = True
        if self._row is not None:
            self._row.given_up.set()
        async with self._turns:
            self._model = None
        await in_thread(_release)

    @asynccontextmanager
    async def _turn(self, on_wait: OnWait) -> AsyncIterator[LoadedModel]:
        """Waits until no other caller uses the model, then loads it if necessary and applies waiting updates."""
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

    def _generated(self, model: LoadedModel, row: Row) -> Ended:
        try:
            generate(model, row, self._watcher)
            if row.finish is None:
                raise PolicyError("The policy is closed.")
            return Ended(self.version, self._watcher.links(row))
        except Exception as error:
            raise _as_policy_error(error) from None


def _as_policy_error(error: Exception) -> Exception:
    if isinstance(error, AresExpError):
        return error
    return PolicyError(f"The model failed: {type(error).__name__}: {error}")


def _release() -> None:
    """Frees the memory that PyTorch has cached on the GPU."""
    import sys

    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
