"""Retry rules, which define after which errors an attempt is retried, how often, and after which wait."""

from __future__ import annotations

import builtins
import random
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, validate_call

from ares_exp.backoff import backoff_sec
from ares_exp.errors import (
    INFRASTRUCTURE,
    AresExpError,
    ConfigError,
    ContainerServiceError,
    EndpointError,
    close_matches,
)
from ares_exp.records.results import Outcome

Tries = Annotated[int, Field(ge=0, le=1000)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class RetryRules:
    """The maximum number of retries of an attempt that failed, by class of the error or by outcome.

    A retry is a new episode with a fresh container and a new agent. The failed episode keeps its row. Only errors are
    retried. Cancelled attempts and attempts that reached a limit are not retried.
    """

    @validate_call
    def __init__(
        self,
        *,
        infrastructure: bool = False,
        container_error: Tries = 0,
        verifier_error: Tries = 0,
        policy_error: Tries = 0,
        agent_error: Tries = 0,
        errored: Tries = 0,
        errors: Mapping[str, Tries | None] | None = None,
        base_sec: Seconds = 5.0,
        max_wait_sec: Seconds = 300.0,
        seed: int | None = None,
    ) -> None:
        """Stores the rules.

        Args:
            infrastructure: Whether temporary errors of containers and endpoints are retried. The number of retries
                depends on the class (see `ares_exp.errors.INFRASTRUCTURE`), and is usually 2. `errors` can set other
                numbers.
            container_error: Number of retries of an attempt with the outcome `container_error`.
            verifier_error: Number of retries of an attempt with the outcome `verifier_error`.
            policy_error: Number of retries of an attempt with the outcome `policy_error`.
            agent_error: Number of retries of an attempt with the outcome `agent_error`.
            errored: Number of retries of an attempt with the outcome `errored`.
            errors: Number of retries by name of an error class, which also applies to its subclasses. If several
                entries match, the most specific class is used. These numbers take precedence over the numbers for
                outcomes. Names with the value `None` are ignored.
            base_sec: Maximum wait before the first retry, in seconds. Each further retry doubles it. Each wait is
                shortened at random by up to half, so that attempts that failed together are not retried together.
            max_wait_sec: Maximum wait in seconds. It also applies if an endpoint requests a longer wait
                (`Retry-After`).
            seed: Seed of the random waits; `None` for different waits in each run. Results do not depend on it.

        Raises:
            ConfigError: A name in `errors` is not an error class.
        """
        self._by_outcome = {
            Outcome.CONTAINER_ERROR: container_error,
            Outcome.VERIFIER_ERROR: verifier_error,
            Outcome.POLICY_ERROR: policy_error,
            Outcome.AGENT_ERROR: agent_error,
            Outcome.ERRORED: errored,
        }
        named = {name: tries for name, tries in (errors or {}).items() if tries is not None}
        self._by_class = {**(INFRASTRUCTURE if infrastructure else {}), **named}
        self._given: dict[str, Any] = {
            "infrastructure": infrastructure,
            **{outcome.value: tries for outcome, tries in self._by_outcome.items()},
            "errors": dict(errors or {}),
            "base_sec": base_sec,
            "max_wait_sec": max_wait_sec,
            "seed": seed,
        }
        self._base_sec = base_sec
        self._max_wait_sec = max_wait_sec
        self._rng = random.Random(seed)
        for name in errors or {}:
            _check_class(name)

    def changed(self, changes: Mapping[str, Any]) -> RetryRules:
        """Returns a copy of the rules with new values, by name, such as `base_sec` or `errors.RateLimitError`.

        Raises:
            ConfigError: No rule or error class has this name.
            ValidationError: A value is invalid.
        """
        given = {**self._given, "errors": dict(self._given["errors"])}
        for name, value in changes.items():
            group, _, error = name.partition(".")
            if group == "errors" and error:
                given["errors"][error] = value
            elif name in given and name != "errors":
                given[name] = value
            else:
                raise ConfigError(f"There is no `retry.{name}`.{close_matches(name, given)}")
        return RetryRules(**given)

    def wait_sec(self, error: BaseException, outcome: Outcome, tries: int) -> float | None:
        """Returns the number of seconds to wait before a failed attempt is retried; `None` if it is not retried.

        Args:
            error: Error that ended the attempt's last episode.
            outcome: Outcome of this episode.
            tries: Number of failed episodes of the attempt, including this one.
        """
        if outcome not in self._by_outcome:
            return None
        named = (self._by_class[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in self._by_class)
        if tries > next(named, self._by_outcome[outcome]):
            return None
        seconds = backoff_sec(tries, base_sec=self._base_sec, max_sec=self._max_wait_sec, rng=self._rng)
        asked = error.retry_after_sec if isinstance(error, EndpointError | ContainerServiceError) else None
        return max(seconds, min(asked or 0.0, self._max_wait_sec))


def _check_class(name: str) -> None:
    own = _names_below(AresExpError)
    builtin = getattr(builtins, name, None)
    if name in own or (isinstance(builtin, type) and issubclass(builtin, Exception)):
        return
    raise ConfigError(
        f"Expected the names in `retry.errors` to be classes of errors, got {name!r:.80}.{close_matches(name, own)} "
        "`ares_exp/errors.py` lists the classes."
    )


def _names_below(kind: type[AresExpError]) -> list[str]:
    """Lists the names of an error class and of all its imported subclasses, including subclasses in user code."""
    below = [name for sub in kind.__subclasses__() for name in _names_below(sub)]
    return sorted({kind.__name__, *below})
