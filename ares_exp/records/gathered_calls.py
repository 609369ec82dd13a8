"""Blocking work that many episodes share: a thread takes all that has gathered while none was free."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Batch(Generic[T]):
    items: list[T] = field(default_factory=list)
    taking: asyncio.Task[None] | None = None


class _OnLoop(Generic[T]):
    """The batch that gathers on one event loop, and the threads that are free for it."""

    def __init__(self, at_once: int) -> None:
        self.gathering: _Batch[T] = _Batch()
        self.free = asyncio.Semaphore(at_once)


class GatheredCalls(Generic[T]):
    """Calls of a blocking function in a thread, each with all items that have gathered meanwhile.

    Items of different event loops do not gather.
    """

    def __init__(self, take: Callable[[Sequence[T]], None], *, at_once: int = 1) -> None:
        """Keeps the arguments.

        Args:
            take: Is called in a thread, and raises nothing: whoever waits for another item would be told.
            at_once: How many calls there are at once.
        """
        self._take = take
        self._at_once = at_once
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OnLoop[T]] = weakref.WeakKeyDictionary()

    def put(self, item: T) -> asyncio.Future[None]:
        """Returns what is done when the function has taken the item. Not to be cancelled: others wait for it, too."""
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is None:
            here = self._loops[loop] = _OnLoop(self._at_once)
        batch = here.gathering
        batch.items.append(item)
        if batch.taking is None:
            batch.taking = loop.create_task(self._taken(here, batch))
        return batch.taking

    async def _taken(self, here: _OnLoop[T], batch: _Batch[T]) -> None:
        async with here.free:
            here.gathering = _Batch()
            await asyncio.to_thread(self._take, batch.items)
            batch.items.clear()  # free what was taken before those who wait for it have all gone on
