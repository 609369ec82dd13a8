"""The start of a container as every backend owes it: once, in time, and undone where it fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from ares_exp.containers.cancellation import finish
from ares_exp.errors import ContainerStartError, EnvironmentStartTimeoutError


def refuse_second_start(*, begun: bool) -> None:
    """What `Container.start` asks first.

    Args:
        begun: Whether it has been started or stopped before.

    Raises:
        ContainerStartError: It has.
    """
    if begun:
        raise ContainerStartError("A container is started once; this one has been started or stopped before.")


@contextlib.asynccontextmanager
async def bounded_start(
    what: str, seconds: float, *, stop: Callable[[], Coroutine[Any, Any, None]], remedy: str = ""
) -> AsyncIterator[None]:
    """Around a start: when it fails, is cancelled or takes too long, what there is of the container is stopped first.

    Args:
        what: What is started, as the first words of a sentence.
        seconds: How long it may take.
        stop: Undoes it, also when little has been done.
        remedy: What a user can do where it takes too long; a sentence.

    Raises:
        EnvironmentStartTimeoutError: It took too long.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except BaseException as error:
        await finish(stop())
        if timer.expired() and isinstance(error, TimeoutError):
            raise EnvironmentStartTimeoutError(
                f"{what} did not start within {seconds:g} s. {remedy}".rstrip()
            ) from error
        raise
