"""One event loop's connection to the service: the SDK's client, and requests that are sent again where that may help."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from daytona import AsyncDaytona

T = TypeVar("T")

CALL_TIMEOUT_SEC = 60.0
"""Bound on one request and what follows from it, further tries included, unless a caller gives another."""


class DaytonaService:
    """Requests to the service. One per event loop."""

    @property
    def client(self) -> AsyncDaytona:
        """The SDK's client."""
        raise NotImplementedError

    async def call(
        self,
        what: str,
        request: Callable[[AsyncDaytona], Awaitable[T]],
        *,
        timeout_sec: float = CALL_TIMEOUT_SEC,
        repeatable: bool = True,
    ) -> T:
        """Sends a request, again where it failed in a way that passes.

        Args:
            what: What is asked for, as the subject of an error message: "The sandbox x".
            request: Sends it once, by the SDK. Called anew for each try.
            timeout_sec: Bound on all tries and the waits between them.
            repeatable: Whether the same request twice does no harm. If not, only what the service has certainly not
                acted upon is sent again: a refusal (429), a connection that could not be made.

        Raises:
            ContainerServiceError: What it ended with; the class says whose fault it is.
            ContainerDiedError: The sandbox that was asked is gone.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        raise NotImplementedError
