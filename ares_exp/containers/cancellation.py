"""Clean-up that a cancelled task still has to finish."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


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
