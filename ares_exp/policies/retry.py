"""Retries of an endpoint: after which errors, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ares_exp.backoff import backoff_sec
from ares_exp.errors import EndpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff with jitter that honours Retry-After.

    Attributes:
        max_retries: Tries after the first one.
        base_sec: Wait before the first retry, doubled for each further one; each wait is shortened by up to half.
        max_wait_sec: Longest wait; a server that asks for more is not tried again.
        rng: Source of the jitter. Timing only: no result depends on it.
    """

    max_retries: int
    base_sec: float
    max_wait_sec: float
    rng: random.Random = field(default_factory=random.Random, repr=False)

    def wait_sec(self, tries: int, error: EndpointError) -> float:
        """Seconds to wait after the `tries`-th try (from 1) failed with `error`.

        Raises:
            EndpointError: There is to be no further try.
        """
        if not error.retryable:
            raise error
        if tries > self.max_retries:
            count = "1 try" if tries == 1 else f"{tries} tries"
            raise _final(error, f"Gave up after {count} (policy.max_retries={self.max_retries}).")
        if error.retry_after_sec is None:
            return backoff_sec(tries, base_sec=self.base_sec, max_sec=self.max_wait_sec, rng=self.rng)
        if error.retry_after_sec > self.max_wait_sec:
            raise _final(
                error,
                f"The server asks to wait {error.retry_after_sec:.0f} s, "
                f"more than policy.max_retry_wait_sec={self.max_wait_sec:g}.",
            )
        # Never earlier than asked; the jitter keeps those who were refused together from coming back together.
        return min(self.max_wait_sec, error.retry_after_sec + self.base_sec * self.rng.uniform(0.0, 0.5))


def _final(error: EndpointError, why: str) -> EndpointError:
    return type(error)(f"{error} {why}", status=error.status, code=error.code, retry_after_sec=error.retry_after_sec)
