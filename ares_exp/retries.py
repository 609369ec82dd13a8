"""Retry rules: after which errors an attempt is tried again, how often, and after how long."""

from __future__ import annotations

import builtins
import random
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.backoff import backoff_sec
from ares_exp.config import close_matches
from ares_exp.errors import AresExpError, ConfigError, ContainerServiceError, EndpointError
from ares_exp.results import Outcome

Tries = Annotated[int, Field(ge=0, le=1000)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class RetryRules:
    """How many further tries an attempt gets that ended without a reward: by the class of its error, or its outcome.

    A further try is a new episode, in a fresh container and with fresh objects; the one before keeps its row. Only
    errors are tried again: what was cancelled, or reached a limit, is not.
    """

    @validate_call
    def __init__(
        self,
        *,
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
        """Keeps the rules.

        Args:
            container_error: Further tries after an error with that outcome, and likewise the next four.
            verifier_error: See there.
            policy_error: See there.
            agent_error: See there.
            errored: See there.
            errors: Further tries by the name of an error's class, or of one that it is derived from: the most specific
                one that is named here wins over the outcome. `None` counts as not named.
            base_sec: Longest wait before the first further try, in seconds; doubled for each one after it, and
                shortened at random by up to half, so that those who failed together do not come back together.
            max_wait_sec: Longest wait of all. An endpoint that asked for more than the wait (`Retry-After`) is given
                it, up to here.
            seed: Seed of the waits; `None`: other ones in every run. No result depends on it.

        Raises:
            ConfigError: There is no such class of errors.
        """
        self._by_outcome = {
            Outcome.CONTAINER_ERROR: container_error,
            Outcome.VERIFIER_ERROR: verifier_error,
            Outcome.POLICY_ERROR: policy_error,
            Outcome.AGENT_ERROR: agent_error,
            Outcome.ERRORED: errored,
        }
        self._by_class = {name: tries for name, tries in (errors or {}).items() if tries is not None}
        self._base_sec = base_sec
        self._max_wait_sec = max_wait_sec
        self._rng = random.Random(seed)
        for name in errors or {}:
            _check_class(name)

    def wait_sec(self, error: BaseException, outcome: Outcome, tries: int) -> float | None:
        """Seconds to wait before the next try; `None` when there is to be none.

        Args:
            error: What ended the last one.
            outcome: Its outcome.
            tries: How many tries of the attempt failed so far, from 1.
        """
        if tries > self._further_tries(error, outcome):
            return None
        seconds = backoff_sec(tries, base_sec=self._base_sec, max_sec=self._max_wait_sec, rng=self._rng)
        asked = error.retry_after_sec if isinstance(error, EndpointError | ContainerServiceError) else None
        return max(seconds, min(asked or 0.0, self._max_wait_sec))

    def _further_tries(self, error: BaseException, outcome: Outcome) -> int:
        if outcome not in self._by_outcome:
            return 0
        named = (self._by_class[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in self._by_class)
        return next(named, self._by_outcome[outcome])


def _check_class(name: str) -> None:
    own = _names_below(AresExpError)
    builtin = getattr(builtins, name, None)
    if name in own or (isinstance(builtin, type) and issubclass(builtin, Exception)):
        return
    raise ConfigError(
        f"Expected the names in `retry.errors` to be classes of errors, got {name!r:.80}.{close_matches(name, own)} "
        "`ares_exp/errors.py` draws the tree of them."
    )


def _names_below(kind: type[AresExpError]) -> list[str]:
    """The class and all that are derived from it: also those of components of one's own, once they are imported."""
    below = [name for sub in kind.__subclasses__() for name in _names_below(sub)]
    return sorted({kind.__name__, *below})
