"""Blocking work that many episodes share: one thread takes what has gathered while it was busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Batch(Generic[T]):
    items: list[T] = field(default_factory=list)
    is_taken: bool = False


class GatheredCalls(Generic[T]):
    """Calls of a blocking function in a thread, one at a time, each with all items that have gathered meanwhile."""

    def __init__(self, take: Callable[[Sequence[T]], None]) -> None:
        """Keeps the function.

        Args:
            take: Is called in a thread, and raises nothing: whoever waits for an item would not hear of it.
        """
        self._take = take
        self._gathering: _Batch[T] = _Batch()
        self._taking = asyncio.Lock()

    async def put(self, item: T) -> None:
        """Returns when the function has taken the item. Not to be cancelled: others wait for the same call."""
        batch = self._gathering
        batch.items.append(item)
        async with self._taking:
            if batch.is_taken:
                return
            batch.is_taken, self._gathering = True, _Batch()
            await asyncio.to_thread(self._take, batch.items)
            batch.items.clear()  # free what was taken before those who wait for it have all gone on
