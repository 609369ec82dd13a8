"""What a cancelled task still has to finish: its clean-up, and what a thread does for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Runs `function` in a thread; on cancellation it is waited for, so that nothing appears behind a clean-up."""
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await finish(asyncio.wait({task}))
        raise


async def finish(work: Coroutine[Any, Any, Any]) -> None:
    """Finishes bounded clean-up work even while the caller is being cancelled, once or repeatedly.

    Errors of the work are dropped: what the caller cleans up after is what it should report.

    Raises:
        asyncio.CancelledError: When the work is done, if the caller was cancelled meanwhile.
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
