"""Clean-up in cancelled tasks, waits with a time limit, and calls in threads that may hang."""

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
    """Runs `function` in a thread.

    If the caller is cancelled, waits for the function to end. Otherwise, the function could still create something
    after the caller's clean-up.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await finish(asyncio.wait({task}))
        raise


async def happened(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits for an event, up to `seconds` (`None` for no limit). Returns whether the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def cancel_all(*tasks: asyncio.Future[Any], within_sec: float | None = None) -> None:
    """Cancels tasks, and waits for their end, up to `within_sec` seconds (`None` for no limit).

    Marks the errors of the tasks as retrieved, so that asyncio does not report them. `result` still raises the errors.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=within_sec)
        for task in ended:
            task.cancelled() or task.exception()


async def finish(work: Coroutine[Any, Any, Any]) -> None:
    """Finishes clean-up work even if the caller is cancelled, also repeatedly. The work must have its own time limit.

    Ignores errors of the work. The caller should report the error that made the clean-up necessary.

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
    """Runs `function` in a daemon thread. With `stays_until`, the thread stays alive until this event is set.

    At exit, the interpreter does not wait for daemon threads. For a hanging thread of a pool, it would wait forever.
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
