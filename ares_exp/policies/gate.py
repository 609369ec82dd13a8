"""The gate before a policy: closed, it holds requests back."""

from __future__ import annotations

import asyncio

from ares_exp.policies.waiting import OnWait, reported


class Gate:
    """Is open at first. What has passed it is not called back."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether requests pass."""
        return self._opened.is_set()

    def open(self) -> None:
        """Lets all pass."""
        self._opened.set()

    def close(self) -> None:
        """Lets nothing pass."""
        self._opened.clear()

    async def passed(self, on_wait: OnWait) -> None:
        """Returns when it is open.

        Args:
            on_wait: Is told of the seconds that this takes, as they pass.
        """
        if self._opened.is_set():
            return
        with reported(on_wait):
            while not self._opened.is_set():  # it may be closed again before the waiting task runs
                await self._opened.wait()
