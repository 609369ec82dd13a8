"""Health checks: commands that must succeed in a container before an agent may start there."""

from __future__ import annotations

import asyncio
import logging
import time

from ares_exp.containers.container import Container, User
from ares_exp.errors import HealthcheckError
from ares_exp.tasks.environment_section import HealthCheck

MAX_HEALTH_CHECK_SEC = 3600.0
"""Bound on a whole health check: the format has none."""
_SHOWN_OUTPUT_CHARS = 500

_logger = logging.getLogger(__name__)


def longest_sec(check: HealthCheck | None) -> float:
    """Computes the upper bound on the check, in seconds."""
    if check is None:
        return 0.0
    once = whole_seconds(check.timeout_sec)
    if once is None:
        return MAX_HEALTH_CHECK_SEC
    counted = max(check.retries, 1) * (once + check.interval_sec)
    return min(check.start_period_sec + once + check.start_interval_sec + counted, MAX_HEALTH_CHECK_SEC)


async def await_health(check: HealthCheck, container: Container, *, user: User | None = None) -> None:
    """Runs the check until it succeeds. Failures before the end of its start period do not count.

    Args:
        check: The table of task.toml.
        container: Where its command is run.
        user: Who runs it; `None` is the image's user.

    Raises:
        HealthcheckError: It failed as often as it may, its command took too long, or all of it did.
        ContainerError: The container failed.
    """
    try:
        async with asyncio.timeout(MAX_HEALTH_CHECK_SEC):
            await _run(check, container, user)
    except TimeoutError:
        raise HealthcheckError(
            f"The health check `{check.command}` did not succeed within {MAX_HEALTH_CHECK_SEC:g} s."
        ) from None


async def _run(check: HealthCheck, container: Container, user: User | None) -> None:
    starts_to_count = time.monotonic() + check.start_period_sec
    failures = 0
    while True:
        counts = time.monotonic() >= starts_to_count
        result = await container.exec(check.command, user=user, timeout_sec=whole_seconds(check.timeout_sec))
        if result.timed_out:  # no failed attempt: the state of its command is unknown
            raise HealthcheckError(
                f"The health check `{check.command}` did not end within its limit of {check.timeout_sec:g} s."
            )
        if result.exit_code == 0:
            return
        _logger.debug("Health check `%s`: exit code %s: %s", check.command, result.exit_code, result.output)
        failures += counts
        if counts and failures >= check.retries:
            raise HealthcheckError(
                f"The health check `{check.command}` failed {failures} times, the last time with exit code "
                f"{result.exit_code}: {result.output.strip()[-_SHOWN_OUTPUT_CHARS:] or 'no output'}"
            )
        await asyncio.sleep(check.interval_sec if counts else check.start_interval_sec)


def whole_seconds(limit: float) -> float | None:
    """Rounds a time limit as the format does: whole seconds; less than one, or infinity, is no limit."""
    return float(int(limit)) if 1 <= limit < float("inf") else None
