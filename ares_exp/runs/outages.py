"""The handling of outages: the run pauses while a container engine, container service or endpoint is unreachable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ares_exp.errors import UnreachableError
from ares_exp.policies.policy import Check
from ares_exp.records.terminal_text import format_duration
from ares_exp.runs.scheduler import Scheduler

MAX_OUTAGE_SEC = 300.0
"""Duration of an outage, in seconds, after which the run ends."""
FIRST_WAIT_SEC, MAX_WAIT_SEC = 1.0, 10.0
"""First and maximum wait before a failed check is repeated, in seconds. The wait doubles after each further failure."""
CHECK_SEC = 30.0
"""Time limit of one check, in seconds."""

logger = logging.getLogger(__name__)


class Outages:
    """Prevents the start of episodes while a service is unreachable. Ends the run after `MAX_OUTAGE_SEC`.

    A check is an async function that raises `UnreachableError` if its service cannot be reached. If several callers
    wait for the same check, it is called only once for all of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        end: Callable[[UnreachableError], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scheduler = scheduler
        self._end = end
        self._clock = clock
        self._sleep = sleep
        self._watches: dict[Check, asyncio.Task[None]] = {}

    async def wait(self, check: Check) -> bool:
        """Waits until a check passes. Returns true if there was an outage, which means that the check failed at first.

        Raises:
            UnreachableError: The check failed for `MAX_OUTAGE_SEC`. The run ends.
        """
        if check not in self._watches:
            if (problem := await _problem(check)) is None:
                return False
            if check not in self._watches:
                self._watches[check] = watch = asyncio.create_task(self._watch(check, str(problem)))
                watch.add_done_callback(lambda done: done.cancelled() or done.exception())  # waiters may be cancelled
        await asyncio.shield(self._watches[check])
        return True

    def close(self) -> None:
        """Stops all repeated checks. Idempotent."""
        for watch in self._watches.values():
            watch.cancel()

    async def _watch(self, check: Check, why: str) -> None:
        self._scheduler.pause(check, why)
        longest = format_duration(MAX_OUTAGE_SEC)
        logger.warning(
            "%s No episode starts until it responds. The run ends after %s without a response.", why, longest
        )
        since, wait_sec = self._clock(), FIRST_WAIT_SEC
        while (left_sec := since + MAX_OUTAGE_SEC - self._clock()) > 0:
            await self._sleep(min(wait_sec, left_sec))
            wait_sec = min(2 * wait_sec, MAX_WAIT_SEC)
            if await _problem(check) is None:
                logger.warning(
                    "New episodes start again after an outage of %s. (%s)", format_duration(self._clock() - since), why
                )
                del self._watches[check]
                self._scheduler.resume(check)
                return
        failure = UnreachableError(f"{why} It did not respond for {longest}.")
        self._end(failure)
        raise failure


async def _problem(check: Check) -> UnreachableError | None:
    """Runs a check once. Returns the `UnreachableError` that it raised.

    Returns `None` if the check passed or failed in another way, such as by a timeout.
    """
    try:
        async with asyncio.timeout(CHECK_SEC):
            await check()
    except UnreachableError as error:
        return error
    except Exception as error:
        logger.debug("A check failed", exc_info=error)
    return None
