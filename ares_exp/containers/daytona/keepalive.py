"""Keepalive of sandboxes while their runner lives.

A sandbox has a time to live, so that those of a dead runner end by themselves. One task of the runner renews it, for
all of its sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerNotFoundError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

_SHARE = 3  # three times in a TTL: two in a row may fail
_TRY_SEC = 30.0
_logger = logging.getLogger(__name__)


@dataclass(order=True)
class _Kept:
    """One sandbox, ordered by its next renewal."""

    due: float
    number: int
    sandbox: AsyncSandbox = field(compare=False)
    ttl_min: int = field(compare=False)


class KeepAlive:
    """Renews the TTL of sandboxes, each at a third of it. One per service."""

    def __init__(self, service: DaytonaService, *, minute_sec: float = 60.0) -> None:
        """Renews nothing yet.

        Args:
            service: The service of the sandboxes.
            minute_sec: Seconds in a minute of a TTL.
        """
        self._service = service
        self._minute_sec = minute_sec
        self._kept: dict[str, _Kept] = {}
        self._queue: list[_Kept] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    def add(self, sandbox: AsyncSandbox, ttl_min: int) -> None:
        """Adds a sandbox, which has its whole TTL left.

        Args:
            sandbox: The sandbox.
            ttl_min: Its TTL in minutes, also that of a sandbox without activity.
        """
        self._schedule(sandbox, ttl_min, ttl_min / _SHARE)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def discard(self, sandbox: AsyncSandbox) -> None:
        """Leaves a sandbox to its TTL. Idempotent."""
        self._kept.pop(sandbox.id, None)

    async def close(self) -> None:
        """Leaves all sandboxes to their TTLs. Idempotent."""
        self._kept.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _schedule(self, sandbox: AsyncSandbox, ttl_min: int, after_min: float) -> None:
        due = asyncio.get_running_loop().time() + after_min * self._minute_sec
        kept = _Kept(due, next(self._numbers), sandbox, ttl_min)
        self._kept[sandbox.id] = kept
        heapq.heappush(self._queue, kept)
        self._changed.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._queue[0].due if self._queue else None):
                    await self._changed.wait()
            due: list[_Kept] = []
            while self._queue and self._queue[0].due <= loop.time():
                kept = heapq.heappop(self._queue)
                if self._kept.get(kept.sandbox.id) is kept:
                    due.append(kept)
            await asyncio.gather(*map(self._prolong, due))

    async def _prolong(self, kept: _Kept) -> None:
        """Renews its TTL; retries within a minute after an error."""
        sandbox, ttl_min, after_min = kept.sandbox, kept.ttl_min, kept.ttl_min / _SHARE

        async def prolong(_: AsyncDaytona) -> None:
            await sandbox.set_ttl(ttl_min)
            await sandbox.refresh_activity()

        try:
            await self._service.call(f"The sandbox {sandbox.name}", prolong, timeout_sec=_TRY_SEC)
        except (ContainerDiedError, ContainerNotFoundError):
            self.discard(sandbox)  # its user gets the error
        except ContainerError as error:
            after_min = min(1.0, after_min)
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _logger.log(level, "The end of a sandbox %d minutes from its last sign of life stays. %s", ttl_min, error)
        if self._kept.get(sandbox.id) is kept:
            self._schedule(sandbox, ttl_min, after_min)
