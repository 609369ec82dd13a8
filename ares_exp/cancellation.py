"""Helpers for asyncio: clean-up in cancelled tasks, waits with a time limit, and threads that may hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Runs `function` in a thread and returns its result.

    If the caller is cancelled, first waits for the function to end. Otherwise, the function could still create
    something, such as a container, after the clean-up of the caller.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await result_of(task)
    except asyncio.CancelledError:
        await finish(asyncio.wait_for(task, None))
        raise


async def result_of(future: asyncio.Future[_T]) -> _T:
    """Returns the result of a future, or raises its exception. Does not cancel the future if the caller is cancelled.

    `asyncio.shield` does the same, but from Python 3.14 on, it logs an exception that follows a cancellation.
    """
    await asyncio.wait({future})
    return future.result()


async def happened(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits until an event is set, for at most `seconds` (`None` for no limit). Returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def cancel_all(*tasks: asyncio.Future[Any], within_sec: float | None = None) -> None:
    """Cancels tasks, and waits until they have ended, for at most `within_sec` seconds (`None` for no limit).

    Does not raise the exceptions of the tasks, but reads them, so that asyncio does not warn that they were never
    retrieved.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=within_sec)
        for task in ended:
            task.cancelled() or task.exception()


async def finish(work: Coroutine[Any, Any, Any]) -> None:
    """Awaits clean-up work until it is done, even if the caller is cancelled once or several times.

    The work must have its own time limit. Its exceptions are ignored, because the caller should report the error that
    made the clean-up necessary.

    Raises:
        asyncio.CancelledError: The caller was cancelled during the work. Raised after the work is done.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    with contextlib.suppress(Exception):
        task.result()
    if cancelled:
        raise asyncio.CancelledError


def in_daemon_thread(function: Callable[[], _T], stays_until: threading.Event | None = None) -> asyncio.Future[_T]:
    """Runs `function`, which may hang, in a daemon thread. Returns a future for its result or exception.

    Python does not wait for daemon threads at exit, but would wait forever for a hanging thread of `asyncio.to_thread`.

    When the thread ends, Linux may kill processes that `function` started. To keep them running, pass an event as
    `stays_until`: the thread then ends only after the event is set.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def work() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(context.run(function))
            except BaseException as error:
                outcome.set_exception(error)
        if stays_until is not None:
            stays_until.wait()

    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(outcome)
