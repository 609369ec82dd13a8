"""The call to one scorer, with a time limit, errors that name the scorer, and validation of the result."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from ares_exp.cancellation import in_daemon_thread
from ares_exp.containers.container import Container
from ares_exp.environments.scoring.scorer import ScoredEpisode, ScorerBase, as_scorer
from ares_exp.errors import ContainerError, ScorerError, ScorerTimeoutError
from ares_exp.records.validation import MAX_NUMBER

REWARD = "reward"
"""Key of the verifier's reward in an episode's rewards, and of the number that counts in a scorer's return value."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one scorer for an episode.

    Attributes:
        name: Name of the scorer.
        weight: Weight in the episode's reward. With 0, the score is only recorded.
        value: Number that counts towards the episode's reward. `None` if the scorer returned several numbers and none
            of them is named `reward`, which is allowed only with weight 0.
        rewards: All numbers from the scorer, by the names under which they are recorded.
    """

    name: str
    weight: float
    value: float | None
    rewards: Mapping[str, float]


def checked_score(name: str, weight: float, returned: Any) -> Score:
    """Validates the return value of a scorer, and makes a score from it.

    For example, if the scorer `style` returns `{"reward": 0.5, "length": 80}`, the numbers are recorded as `style` and
    `style.length`, and 0.5 counts towards the episode's reward. A plain number is recorded as `style`, and it counts. A
    mapping with one number needs no key `reward`: its number counts.

    Raises:
        ScorerError: The value is neither a finite number nor a mapping of names to finite numbers. Or it has several
            numbers without the key `reward`, and `weight` is not 0.
    """
    if not isinstance(returned, Mapping):
        number = _number(name, returned)
        return Score(name, weight, number, {name: number})
    if not returned or not all(isinstance(key, str) and key for key in returned):
        raise ScorerError(
            f"Expected the scorer `{name}` to return a number, or a dict of numbers by name, got {returned!r:.200}.",
            scorer=name,
        )
    numbers = {str(key): _number(name, value) for key, value in returned.items()}
    value = numbers.get(REWARD, next(iter(numbers.values())) if len(numbers) == 1 else None)
    if value is None and weight:
        raise ScorerError(
            f"Expected the scorer `{name}` to return one number, or a mapping with the key `reward`, got the keys "
            f"{', '.join(sorted(numbers)[:20])}. Add the key `reward`, or set `weight: 0` to only record the numbers.",
            scorer=name,
        )
    recorded = {name if key == REWARD else f"{name}.{key}": number for key, number in numbers.items()}
    return Score(name, weight, value, recorded)


def combined_reward(reward: float | None, verifier_weight: float, scores: Sequence[Score]) -> float | None:
    """Returns the weighted sum of `reward` and the scores; `None` if `reward` is missing and its weight is not 0."""
    if reward is None and verifier_weight:
        return None
    total = verifier_weight * reward if reward is not None and verifier_weight else 0.0
    return total + sum(score.weight * score.value for score in scores if score.weight and score.value is not None)


def named_rewards(reward: float | None, verified: Mapping[str, float], scores: Sequence[Score]) -> dict[str, float]:
    """Returns all rewards of an episode by name: the rewards of the verifier (`verified`) and of the scorers.

    If `verified` is empty, includes `reward` itself. Raises `ScorerError` if two rewards have the same name.
    """
    found = dict(verified) if verified or reward is None else {REWARD: reward}
    for score in scores:
        if taken := sorted(found.keys() & score.rewards.keys()):
            raise ScorerError(
                f"The reward {taken[0]!r} of the scorer `{score.name}` has the same name as another reward. Rename "
                "the scorer.",
                scorer=score.name,
            )
        found |= score.rewards
    return found


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) < MAX_NUMBER:  # also rejects non-finite values
        raise ScorerError(f"Expected the scorer `{name}` to return finite numbers, got {value!r:.200}.", scorer=name)
    return number


@dataclass(frozen=True, slots=True)
class ConfiguredScorer:
    """A scorer and its options in a run.

    Attributes:
        name: Name under which the scorer's rewards are recorded.
        part: The scorer: a function, or another callable object.
        weight: Weight in the episode's reward. With 0, the scores are only recorded.
        timeout_sec: Time limit of one call in seconds.
        config: Config of `part` for the records, without secrets.
    """

    name: str
    part: Any
    weight: float = 1.0
    timeout_sec: float = 600.0
    config: Any = None

    @property
    def scorer(self) -> ScorerBase:
        """The scorer, with the defaults of `ScorerBase` for missing members."""
        return as_scorer(self.part)

    @property
    def uses_container(self) -> bool:
        """Whether the scorer uses the container. A scorer that is not `async` cannot, because it runs in a thread."""
        return _is_async(self.part) and self.scorer.uses_container

    async def score(self, episode: ScoredEpisode, container: Container | None) -> Score:
        """Calls the scorer for an episode, and validates the returned numbers.

        Raises:
            ScorerError: The scorer raised, took too long, or returned an invalid value. The message names the scorer.
            ContainerError: The container failed during the call.
        """
        limit = asyncio.timeout(self.timeout_sec)
        try:
            async with limit:
                returned = await _called(self.part, replace(episode, scorer=self.name), container)
            return checked_score(self.name, self.weight, returned)
        except (ScorerError, ContainerError):
            raise
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise ScorerTimeoutError(
                    f"The scorer `{self.name}` did not return within its limit of {self.timeout_sec:g} s "
                    "(`timeout_sec` of the scorer).",
                    scorer=self.name,
                ) from error
            raise ScorerError(
                f"The scorer `{self.name}` raised {type(error).__name__}: {error}", scorer=self.name
            ) from error


async def _called(part: Any, episode: ScoredEpisode, container: Container | None) -> Any:
    if _is_async(part):
        return await part(episode, container)
    returned = await in_daemon_thread(lambda: part(episode, container))
    return await returned if inspect.isawaitable(returned) else returned


def _is_async(part: Any) -> bool:
    while isinstance(part, functools.partial):
        part = part.func
    return inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(type(part).__call__)
