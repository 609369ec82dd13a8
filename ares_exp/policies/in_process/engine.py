"""The thread that owns a model: it loads it, generates batches of what waits, takes new weights, and lets it go.

The event loop never waits for the model: it hands rows over and is told when they have ended. Rows that wait when the
thread is free are one batch; a row is handed back when it has ended, whatever the others of its batch still do.
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
from typing import Any, Protocol

from ares_exp.cancellation import in_thread
from ares_exp.errors import AresExpError, PolicyError, PolicyTimeoutError
from ares_exp.policies.in_process.generation import Watcher, generate
from ares_exp.policies.in_process.sampling import Row

JOIN_SEC = 120.0
"""How long the thread is waited for when it is to end: it ends after the forward pass that is under way."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that generates.

    Attributes:
        model: The module.
        tokenizer: Its tokenizer.
        pad: Id of the padding.
        ends: Ids that end an answer.
        max_tokens: Length of its context; `None` where it has no bound.
    """

    model: Any
    tokenizer: Any
    pad: int
    ends: frozenset[int]
    max_tokens: int | None

    def text(self, ids: Any) -> str:
        """Makes text of ids, special tokens included."""
        made: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return made


class OnEnd(Protocol):
    """What is done in the model's thread when a row has ended, before anybody sees it."""

    def __call__(self, row: Row, /) -> Any:
        """Returns what is handed over with the row."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """A row that has ended.

    Attributes:
        row: The row.
        version: Of the weights that generated it.
        kept: What `OnEnd` returned.
    """

    row: Row
    version: str | None
    kept: Any


@dataclass(eq=False, slots=True)
class _Job:
    row: Row
    future: Future[Ended]
    on_begin: Callable[[float], None]
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
        watcher: Watcher,
        on_end: OnEnd,
    ) -> None:
        """Starts nothing yet.

        Args:
            load: Gives the model; called in the thread.
            version: Of its weights.
            max_batch_size: Bound on the rows of a batch.
            batch_wait_sec: How long the first row of a batch waits for others.
            watcher: Looks into the model while it generates.
            on_end: Is called for each row that has ended.
        """
        self.version = version
        self._load = load
        self._max_batch_size = max_batch_size
        self._batch_wait_sec = batch_wait_sec
        self._watcher = watcher
        self._on_end = on_end
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._updates: list[_Update] = []
        self._under_way: list[_Job] = []
        self._is_closing = False
        self._loaded: Future[LoadedModel] = Future()
        self._thread = threading.Thread(target=self._run, name="ares_exp-model", daemon=True)

    def start(self) -> None:
        """Starts the thread, which loads the model."""
        self._thread.start()

    async def loaded(self) -> LoadedModel:
        """Waits for the model.

        Raises:
            AresExpError: It could not be loaded.
        """
        return await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def generate(self, row: Row, *, timeout_sec: float, on_wait: Callable[[float], None]) -> Ended:
        """Generates a row to its end. If the caller is cancelled, the row ends at its next token.

        Args:
            row: The row.
            timeout_sec: Bound on the whole of it, the wait for a batch included.
            on_wait: Is told how long it waited for its batch, when that begins.

        Raises:
            PolicyError: It could not be generated.
        """
        loop = asyncio.get_running_loop()
        job = _Job(row, Future(), lambda waited: _tell(loop, on_wait, waited))
        self._put(self._jobs, job)
        try:
            async with asyncio.timeout(timeout_sec):
                return await asyncio.wrap_future(job.future)
        except TimeoutError:
            raise PolicyTimeoutError(
                f"The model gave no answer within {timeout_sec:g} s: raise policy.timeout_sec, or lower "
                "policy.max_output_tokens."
            ) from None
        finally:
            row.given_up.set()

    async def update(self, version: str, apply: Callable[[LoadedModel], None]) -> None:
        """Changes the weights when no row is under way; rows that wait are generated by the new ones.

        Raises:
            AresExpError: As `apply`.
        """
        update = _Update(version, apply, Future())
        self._put(self._updates, update)
        await asyncio.wrap_future(update.future)

    async def close(self) -> None:
        """Ends the rows under way and the thread, and lets the model go. Idempotent."""
        with self._changed:
            self._is_closing = True
            for job in (*self._under_way, *self._jobs):
                job.row.given_up.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            await in_thread(lambda: self._thread.join(JOIN_SEC))

    def _put(self, queue: list[Any], item: Any) -> None:
        with self._changed:
            if self._is_closing:
                raise PolicyError("The policy is closed.")
            queue.append(item)
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
            self._loaded = Future()  # which held the model
            del model
            _release()

    def _step(self, model: LoadedModel) -> bool:
        """Takes an update or generates a batch; returns whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._updates or self._is_closing)
            if self._jobs and not self._updates and len(self._jobs) < self._max_batch_size:
                self._changed.wait_for(lambda: self._is_closing, self._batch_wait_sec)
            if self._is_closing:
                return False
            updates, self._updates = self._updates, []
            if not updates:
                waiting = [job for job in self._jobs if not job.row.given_up.is_set()]
                self._under_way, self._jobs = waiting[: self._max_batch_size], waiting[self._max_batch_size :]
        for update in updates:
            self._take(update, model)
        if not updates and self._under_way:
            self._generate(self._under_way, model)
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
            job.on_begin(now - job.since)
            job.row.on_end = self._hand_over(job)
        try:
            generate(
                model.model,
                [job.row for job in jobs],
                pad=model.pad,
                ends=model.ends,
                decode=model.text,
                watcher=self._watcher,
            )
            left: Exception = PolicyError("Nobody waits for this answer any more.")
        except Exception as error:
            left = _told(error)
        self._under_way = []
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
        """Ends what waits, and what comes: the thread is gone."""
        told = _told(error)
        with self._changed:
            self._is_closing = True
            waiting: list[Future[Any]] = [job.future for job in (*self._under_way, *self._jobs)]
            waiting += [update.future for update in self._updates]
            self._under_way, self._jobs, self._updates = [], [], []
        _settle(self._loaded, error=told)
        for future in waiting:
            _settle(future, error=told)


def _settle(future: Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Ends a future, unless it has ended: its waiter was cancelled, or it was ended before."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _told(error: BaseException) -> Exception:
    """Returns the error that the waiters get."""
    if isinstance(error, AresExpError):
        return error
    return PolicyError(f"The model failed: {type(error).__name__}: {error}")


def _tell(loop: asyncio.AbstractEventLoop, on_wait: Callable[[float], None], waited: float) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(on_wait, waited)


def _release() -> None:
    """Gives the memory of what was dropped back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
