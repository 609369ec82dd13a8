"""The statistics of all attempts at one task, and pass rates over tasks."""

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
    """pass@k and pass^k for one k, over the tasks with at least k attempts.

    pass@k is the probability that at least one of k attempts at a task passes, and pass^k that all of them pass.

    Attributes:
        k: Number of attempts.
        pass_at_k: Estimate of pass@k. Its attribute `tasks` is the number of tasks with at least k attempts. `None`
            without such tasks.
        pass_hat_k: Estimate of pass^k, over the same tasks; `None` without such tasks.
    """

    k: int
    pass_at_k: Estimate | None
    pass_hat_k: Estimate | None


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Computes the probability that at least one of `k` attempts, chosen at random from all attempts, passed."""
    return 1 - comb(attempts - passed, k) / comb(attempts, k)


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """Computes the probability that all of `k` attempts, chosen at random from all attempts, passed."""
    return comb(passed, k) / comb(attempts, k)


def ks_up_to(attempts: int) -> tuple[int, ...]:
    """Returns the values of k for which pass rates are shown: the powers of two up to `attempts`, and `attempts`."""
    return tuple(sorted({*(2**power for power in range(attempts.bit_length())), attempts} - {0}))


def pass_rates(counts: Sequence[tuple[int, int]], ks: Sequence[int], *, level: float = LEVEL) -> tuple[PassRate, ...]:
    """Computes pass rates for every k in `ks`. `counts` contains the attempts and passed attempts of each task."""
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
    """Computes the pass rates of a single task, with intervals over its attempts.

    Each bound `p` of the interval for the share of passed attempts gives one bound of each pass rate:
    `1 - (1 - p)^k` for pass@k, and `p^k` for pass^k.
    """
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
    """The statistics of one task of a run. An attempt with several episodes is represented by its last episode.

    Attributes:
        rewards: Rewards of the attempts, in order; `None` for an attempt without a reward.
        passed: Number of attempts whose reward reached the threshold.
        mean_reward: Mean over the attempts with a reward; `None` if there are no rewards.
        outcomes: Number of attempts by outcome.
        errors: Number of attempts without a reward, by class of the error.
        tries: Number of all episodes of these attempts.
        num_steps, tokens: Mean number of steps, and mean number of tokens (prompt and generated), per attempt.
        cost: Mean cost of an attempt, in US dollars.
        seconds: Mean duration of an attempt, in wall-clock seconds.
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
        """Computes the statistics of a task. `results` contains the last episode of each attempt, at least one."""
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
        """The number of attempts."""
        return len(self.rewards)

    @property
    def scored_rewards(self) -> tuple[float, ...]:
        """The rewards of the attempts that have a reward."""
        return tuple(reward for reward in self.rewards if reward is not None)

    @property
    def rewards_with_zeros(self) -> tuple[float, ...]:
        """The rewards of all attempts, with 0.0 for attempts without a reward."""
        return tuple(reward if reward is not None else 0.0 for reward in self.rewards)

    @property
    def scored(self) -> int:
        """The number of attempts with a reward."""
        return len(self.scored_rewards)

    @property
    def pass_rate(self) -> float | None:
        """The share of the attempts with a reward that passed; `None` if there are no rewards."""
        return self.passed / self.scored if self.scored else None

    @property
    def pass_variance(self) -> float | None:
        """The variance `p (1 - p)` of a single attempt's success, where p is the pass rate; `None` without rewards."""
        return None if self.pass_rate is None else self.pass_rate * (1 - self.pass_rate)

    @property
    def is_flaky(self) -> bool:
        """Whether some attempts passed and others failed. Attempts without a reward are ignored."""
        return 0 < self.passed < self.scored


def count_errors(results: Iterable[EpisodeResult]) -> dict[str, int]:
    """Counts the errors in `results` by class. The most common class is first."""
    return dict(Counter(result.error.type for result in results if result.error is not None).most_common())


def by_task(results: Sequence[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Groups results by task. The tasks are in alphabetical order."""
    name = attrgetter("task_name")
    return {task: list(own) for task, own in groupby(sorted(results, key=name), key=name)}
