"""pass@k and pass^k: the probability that at least one, or every one, of k attempts at a task passes. Unbiased.

Of n attempts that passed c times (combinations, so that every choice of k of them counts once):

    pass@k = 1 - C(n - c, k) / C(n, k)     Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1
    pass^k = C(c, k) / C(n, k)             Yao et al. 2024, "τ-bench", section 3

The mean is taken over the tasks with at least k attempts: it is not defined for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from ares_exp.records.statistics.estimate import LEVEL, Estimate, mean_over_tasks, wilson


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
