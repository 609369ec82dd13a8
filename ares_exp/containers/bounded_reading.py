"""File reading in a thread, with a time limit and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ares_exp.cancellation import finish
from ares_exp.containers.filesystem.delta import Entry
from ares_exp.errors import CaptureError

READ_SEC = 300.0

Skip = Callable[[str], bool]
"""A function that returns whether a path is skipped."""


async def bounded(read: Callable[[Skip], dict[str, Entry]], skip: Skip) -> dict[str, Entry]:
    """Runs `read` in a thread, with a time limit of `READ_SEC`.

    `read` calls its argument for each path. After the time limit, or if the caller is cancelled, this call raises an
    error, which ends `read`.

    Args:
        read: Function that reads files. Its argument decides which paths are skipped.
        skip: The same decision, without the time limit.

    Raises:
        CaptureError: The read took longer than `READ_SEC`. Errors of `read` are also raised.
    """
    given_up = threading.Event()

    def skip_or_give_up(path: str) -> bool:
        if given_up.is_set():
            raise CaptureError(f"The changed files could not be read within {READ_SEC:g} s.")
        return skip(path)

    reading = asyncio.ensure_future(asyncio.to_thread(read, skip_or_give_up))
    try:
        await asyncio.wait({reading}, timeout=READ_SEC)
    finally:
        given_up.set()
        await finish(asyncio.wait({reading}))
    return reading.result()
