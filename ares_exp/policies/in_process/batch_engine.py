"""The thread that owns a model.

It loads the model, generates batches of waiting rows, updates weights, and frees the model.

The event loop never waits for the model: it submits rows and is notified of their end. When the thread is free, the
waiting rows become one batch. A row is returned when it has ended, independent of the other rows of its batch.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ares_exp.cancellation import in_thread
from ares_exp.errors import AresExpError, PolicyError, PolicyTimeoutError
from ares_exp.policies.in_process.generation import LoadedModel, Watch, generate
from ares_exp.policies.in_process.sampling import Row

JOIN_SEC = 120.0
"""Time limit in seconds for the thread to end, which it does after the current forward pass."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished row.

    Attributes:
        row: Row that has ended.
        version: Version of the weights that generated the row.
        kept: Result of `on_end`.
    """

    row: Row
    version: str | None
    kept: Any


@dataclass(eq=False, slots=True)
class _Job:
    row: Row
    future: Future[Ended]
    on_start: Callable[[float], None]
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False, slots=True)
class _Update:
    version: str
    apply: Callable[[LoadedModel], None]
    future: Future[None]


class ModelThread:
    """One model and its thread, from `start` to `close`."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        *,
        version: str | None,
        max_batch_size: int,
        batch_wait_sec: float,
        watch: Watch,
        on_end: Callable[[Row], Any],
    ) -> None:
        """Keeps the settings. `start` starts the thread.

        Args:
            load: Function that loads the model, called in the thread.
            version: Version of the model's weights.
            max_batch_size: Maximum number of rows in a batch.
            batch_wait_sec: Time in seconds that the first row of a batch waits for others.
            watch: Context manager around the generation of each batch; see `Watch`.
            on_end: Function that is called in the thread for each finished row. Its result is returned with the row.
        """
        self.version = version
        self._load = load
        self._max_batch_size = max_batch_size
        self._batch_wait_sec = batch_wait_sec
        self._watch = watch
        self._on_end = on_end
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._updates: list[_Update] = []
        self._in_progress: list[_Job] = []
        self._is_closing = False
        self._loaded: Future[LoadedModel] = Future()
        self._thread = threading.Thread(target=self._run, name="ares_exp-model", daemon=True)

    def start(self) -> None:
        """Starts the thread, which loads the model."""
        self._thread.start()

    async def loaded(self) -> LoadedModel:
        """Waits for the model.

        Raises:
            AresExpError: The model could not be loaded.
        """
        return await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def generate(self, row: Row, *, timeout_sec: float, on_wait: Callable[[float], None]) -> Ended:
        """Generates a row until it ends. If the caller is cancelled, the row ends at its next token.

        Args:
            row: Row to generate.
            timeout_sec: Time limit in seconds, including the wait for a batch.
            on_wait: Callback for the seconds that the row waited for its batch, called at the batch's start.

        Raises:
            PolicyError: The row could not be generated.
        """
        loop = asyncio.get_running_loop()
        job = _Job(row, Future(), lambda waited: _tell(loop, on_wait, waited))
        self._put(job)
        try:
            async with asyncio.timeout(timeout_sec):
                return await asyncio.wrap_future(job.future)
        except TimeoutError:
            raise PolicyTimeoutError(
                f"The model gave no response within {timeout_sec:g} s: raise policy.timeout_sec, or lower "
                "policy.max_output_tokens."
            ) from None
        finally:
            row.given_up.set()

    async def update(self, version: str, apply: Callable[[LoadedModel], None]) -> None:
        """Changes the weights when no row is running. Waiting rows are generated with the new weights.

        Raises:
            AresExpError: `apply` failed.
        """
        update = _Update(version, apply, Future())
        self._put(update)
        await asyncio.wrap_future(update.future)

    async def close(self) -> None:
        """Cancels running rows, ends the thread, and frees the model. Idempotent."""
        with self._changed:
            self._is_closing = True
            for job in (*self._in_progress, *self._jobs):
                job.row.given_up.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            await in_thread(lambda: self._thread.join(JOIN_SEC))

    def _put(self, item: _Job | _Update) -> None:
        with self._changed:
            if self._is_closing:
                raise PolicyError("The policy is closed.")
            if isinstance(item, _Job):
                self._jobs.append(item)
            else:
                self._updates.append(item)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            model = self._load()
        except BaseException as error:
            self._fail_all(error)
            return
        self._loaded.set_result(model)
        try:
            while self._step(model):
                pass
        finally:
            self._fail_all(PolicyError("The policy is closed."))
            self._loaded = Future()  # the old future holds the model
            del model
            _release()

    def _step(self, model: LoadedModel) -> bool:
        """Applies updates or generates a batch. Returns whether to continue."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._updates or self._is_closing)
            if self._jobs and not self._updates and len(self._jobs) < self._max_batch_size:
                self._changed.wait_for(lambda: self._is_closing, self._batch_wait_sec)
            if self._is_closing:
                return False
            updates, self._updates = self._updates, []
            if not updates:
                waiting = [job for job in self._jobs if not job.row.given_up.is_set()]
                self._in_progress, self._jobs = waiting[: self._max_batch_size], waiting[self._max_batch_size :]
        for update in updates:
            self._take(update, model)
        if not updates and self._in_progress:
            self._generate(self._in_progress, model)
        return True

    def _take(self, update: _Update, model: LoadedModel) -> None:
        try:
            update.apply(model)
        except Exception as error:
            _settle(update.future, error=_told(error))
            return
        self.version = update.version
        _settle(update.future)

    def _generate(self, jobs: list[_Job], model: LoadedModel) -> None:
        now = time.monotonic()
        for job in jobs:
            job.on_start(now - job.since)
            job.row.on_end = self._hand_over(job)
        try:
            generate(model, [job.row for job in jobs], self._watch)
            left: Exception = PolicyError("No episode waits for this response any more.")
        except Exception as error:
            left = _told(error)
        self._in_progress = []
        for job in jobs:
            _settle(job.future, error=left)

    def _hand_over(self, job: _Job) -> Callable[[], None]:
        def hand_over() -> None:
            try:
                ended = Ended(job.row, self.version, self._on_end(job.row))
            except Exception as error:
                _settle(job.future, error=_told(error))
            else:
                _settle(job.future, ended)

        return hand_over

    def _fail_all(self, error: BaseException) -> None:
        """Fails all waiting jobs and rejects new ones, because the thread is ending."""
        told = _told(error)
        with self._changed:
            self._is_closing = True
            waiting: list[Future[Any]] = [job.future for job in (*self._in_progress, *self._jobs)]
            waiting += [update.future for update in self._updates]
            self._in_progress, self._jobs, self._updates = [], [], []
        _settle(self._loaded, error=told)
        for future in waiting:
            _settle(future, error=told)


def _settle(future: Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Completes a future, unless it is done or its waiter was cancelled."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _told(error: BaseException) -> Exception:
    """Returns the error to raise in the waiting callers."""
    if isinstance(error, AresExpError):
        return error
    return PolicyError(f"The model failed: {type(error).__name__}: {error}")


def _tell(loop: asyncio.AbstractEventLoop, on_wait: Callable[[float], None], waited: float) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(on_wait, waited)


def _release() -> None:
    """Returns freed memory to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
