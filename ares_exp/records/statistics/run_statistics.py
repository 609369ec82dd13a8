"""The statistics of one run and of its tasks: mean rewards, pass rates, errors, usage and durations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import comb
from operator import attrgetter
from statistics import median, quantiles
from typing import Any, Self

from ares_exp.records.results import UNFINISHED, EpisodeResult, RunSummary, count_outcomes, final_results
from ares_exp.records.run_dir import finite
from ares_exp.records.statistics.estimate import LEVEL, Estimate, mean, mean_over_attempts, mean_over_tasks, wilson


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


THRESHOLD = 1.0
DIGITS = 10
"""Number of significant digits of floats in JSON. Additional digits would only be rounding errors."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The mean reward and the pass rates of a run, over some or all of its attempts.

    Attempts without a reward are either included with reward 0, or not included.

    Attributes:
        tasks: Number of tasks that have at least one included attempt.
        attempts: Number of included attempts.
        mean_reward: Mean reward of the included attempts; `None` if no attempt is included.
        pass_rates: pass@k and pass^k for k = 1, 2, 4, …, and for the largest number of attempts at a task.
    """

    tasks: int
    attempts: int
    mean_reward: Estimate | None
    pass_rates: tuple[PassRate, ...]


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """The statistics of a run. An attempt with several episodes is represented by its last episode.

    Attempts that never started are only counted in `planned`.

    Attributes:
        threshold: Minimum reward of an attempt that passes.
        level: Confidence level of the intervals.
        planned: Number of planned attempts.
        attempts: Number of attempts that ended.
        tries: Number of episodes of these attempts.
        retried: Number of attempts with more than one episode.
        errors_as_zero: Scores in which an attempt without a reward counts as reward 0. Interrupted attempts
            (`UNFINISHED`) are not included in any scores.
        scored_only: Scores over only the attempts that have a reward.
        outcomes: Number of attempts by outcome.
        errors: Number of attempts without a reward, by class of the error. Interrupted attempts are not counted.
        retried_errors: Number of episodes after which their attempt was run again, by class of the error.
        tokens, generated_tokens, cost, num_steps, seconds: Distributions over the attempts. `seconds` is wall-clock
            time.
        phase_sec: Distributions of wall-clock seconds by phase, over the attempts in which the phase occurred.
        tasks: Statistics of each task.
    """

    threshold: float
    level: float
    planned: int
    attempts: int
    tries: int
    retried: int
    errors_as_zero: Scores
    scored_only: Scores
    outcomes: Mapping[str, int]
    errors: Mapping[str, int]
    retried_errors: Mapping[str, int]
    tokens: Spread
    generated_tokens: Spread
    cost: Spread
    num_steps: Spread
    seconds: Spread
    phase_sec: Mapping[str, Spread]
    tasks: tuple[TaskStatistics, ...]

    @classmethod
    def of(
        cls, results: Sequence[EpisodeResult], *, planned: int, threshold: float = THRESHOLD, level: float = LEVEL
    ) -> Self:
        """Computes the statistics. `results` contains all episodes of the run, including retried ones."""
        final = final_results(results)
        last = {id(result) for result in final}
        tries = Counter((result.task_name, result.attempt) for result in results)
        tasks = tuple(
            TaskStatistics.of(own, tries=sum(tries[name, one.attempt] for one in own), threshold=threshold)
            for name, own in by_task([one for one in final if one.outcome not in UNFINISHED]).items()
        )
        ks = ks_up_to(max((task.attempts for task in tasks), default=0))
        names = dict.fromkeys(name for result in final for name in result.phase_sec)
        return cls(
            threshold=threshold,
            level=level,
            planned=planned,
            attempts=len(final),
            tries=len(results),
            retried=sum(number > 1 for number in tries.values()),
            errors_as_zero=_scores(tasks, lambda task: task.rewards_with_zeros, ks, level),
            scored_only=_scores(tasks, lambda task: task.scored_rewards, ks, level),
            outcomes=count_outcomes(final),
            errors=count_errors(one for one in final if one.reward is None and one.outcome not in UNFINISHED),
            retried_errors=count_errors(result for result in results if id(result) not in last),
            tokens=Spread.of([result.prompt_tokens + result.generated_tokens for result in final]),
            generated_tokens=Spread.of([result.generated_tokens for result in final]),
            cost=Spread.of([result.cost for result in final]),
            num_steps=Spread.of([result.num_steps for result in final]),
            seconds=Spread.of([result.duration_sec for result in final]),
            phase_sec={
                name: Spread.of([one.phase_sec[name] for one in final if name in one.phase_sec]) for name in names
            },
            tasks=tasks,
        )

    @property
    def flaky(self) -> tuple[str, ...]:
        """The names of the tasks with both passed and failed attempts. Attempts without a reward are ignored."""
        return tuple(task.task_name for task in self.tasks if task.is_flaky)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics in JSON-ready form, without `tasks`. NaN and infinity become `None`."""
        data = {key: value for key, value in asdict(self).items() if key != "tasks"}
        return dict(json_ready({**data, "flaky": self.flaky}))


def _scores(
    tasks: Sequence[TaskStatistics],
    rewards_of: Callable[[TaskStatistics], tuple[float, ...]],
    ks: Sequence[int],
    level: float,
) -> Scores:
    rewards = [rewards_of(task) for task in tasks]
    counts = [(len(own), task.passed) for own, task in zip(rewards, tasks, strict=True) if own]
    return Scores(
        tasks=len(counts),
        attempts=sum(attempts for attempts, _ in counts),
        mean_reward=mean_over_attempts(rewards, level=level),
        pass_rates=pass_rates(counts, ks, level=level),
    )


def mean_scores(
    results: Sequence[EpisodeResult], added: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, Estimate]]:
    """Yields the names and estimated means of rewards computed after the run (`added`, from `added_rewards`)."""
    attempts = by_task(final_results(results)).values()
    for name in dict.fromkeys(name for rewards in added.values() for name in rewards):
        scores = [[one.rewards[name] for one in own if name in one.rewards] for own in attempts]
        if (estimate := mean_over_attempts(scores)) is not None:
            yield name, estimate


def json_ready(data: Any) -> Any:
    """Copies JSON-like data, with floats rounded to `DIGITS` digits. NaN and infinity become `None`."""
    return finite(data, digits=DIGITS)


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a number, such as the cost, over attempts. `p95` is the interpolated 95th percentile."""

    count: int
    mean: float
    median: float
    p95: float
    total: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Computes the distribution of `values`. All fields are zero if there are no values."""
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
        return cls(len(values), mean(values), median(values), p95, math.fsum(values))


SCHEMA_VERSION = 1


def results_document(summary: RunSummary) -> dict[str, Any]:
    """Returns the content of `results.json`."""
    statistics = RunStatistics.of(summary.results, planned=summary.planned, threshold=summary.threshold)
    return {
        "schema_version": SCHEMA_VERSION,
        "totals": json_ready(summary.to_dict()),
        "statistics": statistics.to_dict(),
        "tasks": [
            json_ready(
                {
                    **asdict(task),
                    "attempts": task.attempts,
                    "scored": task.scored,
                    "pass_rate": task.pass_rate,
                    "pass_variance": task.pass_variance,
                    "flaky": task.is_flaky,
                }
            )
            for task in statistics.tasks
        ],
    }
