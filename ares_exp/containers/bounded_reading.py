"""Reading of a container's files in a thread that gives up when it takes too long, or when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ares_exp.containers.cancellation import finish
from ares_exp.errors import CaptureError
from ares_exp.filesystem.delta import Entry

READ_SEC = 300.0
"""Bound on the reading of a container's files."""

Skip = Callable[[str], bool]
"""Whether a path is left out."""


async def bounded(read: Callable[[Skip], dict[str, Entry]], skip: Skip) -> dict[str, Entry]:
    """Runs `read` in a thread. It is told to give up by `skip`, when it takes too long or the caller is cancelled.

    Raises:
        CaptureError: It took longer than `READ_SEC`; or what `read` raises.
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
