"""Statistics of the attempts at one task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import comb
from operator import attrgetter
from typing import Self

from ares_exp.records.results import EpisodeResult, count_outcomes
from ares_exp.records.statistics.estimate import LEVEL, Estimate, mean, mean_over_tasks, wilson


@dataclass(frozen=True, slots=True)
class PassRate:
    """Both rates for one k.

    Attributes:
        k: Attempts.
        pass_at_k: pass@k; `None` when no task has k attempts. Its `tasks` says for how many it is defined.
        pass_hat_k: pass^k; likewise.
    """

    k: int
    pass_at_k: Estimate | None
    pass_hat_k: Estimate | None


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Computes the probability that of k attempts, chosen from these, at least one has passed."""
    return 1 - comb(attempts - passed, k) / comb(attempts, k)


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """Computes the probability that k attempts, chosen from these, have all passed."""
    return comb(passed, k) / comb(attempts, k)


def ks_up_to(attempts: int) -> tuple[int, ...]:
    """Lists 1, 2, 4, 8 …, and the number of attempts itself."""
    return tuple(sorted({*(2**power for power in range(attempts.bit_length())), attempts} - {0}))


def pass_rates(counts: Sequence[tuple[int, int]], ks: Sequence[int], *, level: float = LEVEL) -> tuple[PassRate, ...]:
    """Computes the rates for every k of `ks`.

    Args:
        counts: For each task, how many attempts it had and how many of them passed.
        ks: Numbers of attempts.
        level: How often each interval is to hold the true rate.
    """
    return tuple(_pass_rate([one for one in counts if one[0] >= k], k, level) for k in ks)


def _pass_rate(counts: Sequence[tuple[int, int]], k: int, level: float) -> PassRate:
    if not counts:
        return PassRate(k, None, None)
    if len(counts) == 1:
        return _of_one_task(*counts[0], k, level)
    total = sum(attempts for attempts, _ in counts)
    at_least_one, every_one = (
        mean_over_tasks([rate(*one, k) for one in counts], attempts=total, is_skewed=k > 1, level=level)
        for rate in (pass_at_k, pass_hat_k)
    )
    return PassRate(k, at_least_one, every_one)


def _of_one_task(attempts: int, passed: int, k: int, level: float) -> PassRate:
    """Computes the rates of one task from the interval of its probability p: `1 - (1 - p)^k` and `p^k` at both ends."""
    low, high = wilson(passed / attempts, attempts, level=level)
    return PassRate(
        k,
        _between(pass_at_k(attempts, passed, k), 1 - (1 - low) ** k, 1 - (1 - high) ** k, attempts),
        _between(pass_hat_k(attempts, passed, k), low**k, high**k, attempts),
    )


def _between(value: float, low: float, high: float, attempts: int) -> Estimate:
    return Estimate(value, min(low, value), max(high, value), 1, attempts, "attempts")


@dataclass(frozen=True, slots=True)
class TaskStatistics:
    """Statistics of one task of a run, from the last try of each attempt.

    Attributes:
        task_name: The task.
        rewards: Of the attempts, by their number; `None` where there is none.
        passed: How many of them reach the threshold.
        mean_reward: Over those with a reward; `None` when there are none.
        outcomes: How many ended how.
        errors: Of attempts without a reward: how many had which error, by its class.
        tries: Tries of these attempts, the last ones included.
        num_steps, tokens, cost, seconds: Means over the attempts: answers applied, prompt and generated tokens, US
            dollars, wall seconds.
    """

    task_name: str
    rewards: tuple[float | None, ...]
    passed: int
    mean_reward: float | None
    outcomes: Mapping[str, int]
    errors: Mapping[str, int]
    tries: int
    num_steps: float
    tokens: float
    cost: float
    seconds: float

    @classmethod
    def of(cls, results: Sequence[EpisodeResult], *, tries: int, threshold: float) -> Self:
        """Computes the statistics from the last try of each attempt at one task, at least one."""
        results = sorted(results, key=attrgetter("attempt"))
        rewards = tuple(result.reward for result in results)
        scored = [reward for reward in rewards if reward is not None]
        return cls(
            task_name=results[0].task_name,
            rewards=rewards,
            passed=sum(reward >= threshold for reward in scored),
            mean_reward=mean(scored) if scored else None,
            outcomes=count_outcomes(results),
            errors=count_errors(result for result in results if result.reward is None),
            tries=tries,
            num_steps=mean([result.num_steps for result in results]),
            tokens=mean([result.prompt_tokens + result.generated_tokens for result in results]),
            cost=mean([result.cost for result in results]),
            seconds=mean([result.duration_sec for result in results]),
        )

    @property
    def attempts(self) -> int:
        """Number of attempts."""
        return len(self.rewards)

    @property
    def scored_rewards(self) -> tuple[float, ...]:
        """Rewards of the attempts that have one."""
        return tuple(reward for reward in self.rewards if reward is not None)

    @property
    def rewards_with_zeros(self) -> tuple[float, ...]:
        """Rewards of all attempts: 0.0 for those that have none."""
        return tuple(reward if reward is not None else 0.0 for reward in self.rewards)

    @property
    def scored(self) -> int:
        """Number of attempts with a reward."""
        return len(self.scored_rewards)

    @property
    def pass_rate(self) -> float | None:
        """Of the attempts with a reward, the share that passed; `None` when there are none."""
        return self.passed / self.scored if self.scored else None

    @property
    def pass_variance(self) -> float | None:
        """`p (1 - p)` with the pass rate p: 0.0 for always and for never, 0.25 for a toss of a coin."""
        return None if self.pass_rate is None else self.pass_rate * (1 - self.pass_rate)

    @property
    def is_flaky(self) -> bool:
        """Whether it passes sometimes, neither always nor never, leaving out attempts without a reward."""
        return 0 < self.passed < self.scored


def count_errors(results: Iterable[EpisodeResult]) -> dict[str, int]:
    """Counts errors by their class, the commonest first."""
    return dict(Counter(result.error.type for result in results if result.error is not None).most_common())


def by_task(results: Sequence[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Groups results by task, in the order of the tasks' names."""
    name = attrgetter("task_name")
    return {task: list(own) for task, own in groupby(sorted(results, key=name), key=name)}
