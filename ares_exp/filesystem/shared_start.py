"""What containers that start with the same changes have in common: made once, kept until none will start any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar, cast


class Kept(Protocol):
    """Something that a backend made of changes: an image that has them, a directory with their files."""

    async def give_back(self) -> None:
        """Gives it up; what nobody uses any more is removed. Idempotent."""
        ...


KeptT = TypeVar("KeptT", bound=Kept)


class SharedStart:
    """Keeps what backends made of changes, beyond the containers that they made it for. Safe for several threads."""

    def __init__(self) -> None:

        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}
        self._is_closed = False

    def keep(self, name: str, make: Callable[[], KeptT]) -> KeptT | None:
        """Returns what is kept under a name; `None` after `close`.

        Args:
            name: Tells it from others; the same kind of thing always has the same name.
            make: Makes it, the first time. Must not block.
        """
        with self._lock:
            if self._is_closed:
                return None
            if name not in self._kept:
                self._kept[name] = make()
            return cast("KeptT", self._kept[name])

    async def close(self) -> None:
        """Gives everything back. Idempotent."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, {}
        for one in kept.values():
            await one.give_back()
