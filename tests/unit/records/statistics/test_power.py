"""How many attempts or tasks would settle it: against published sample sizes, scipy's power, and what must be so."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import scipy

from ares_exp.records.statistics.estimate import mean
from ares_exp.records.statistics.paired import sign_flip_p
from ares_exp.records.statistics.power import Obstacle, find_remedy

Pairs = Sequence[tuple[Sequence[float], Sequence[float]]]


def _effect(size: float) -> Pairs:
    """Single attempts whose differences have mean `size` and standard deviation 1."""
    spread = math.sqrt(7 / 8)
    return [((0.0,), (size + sign * spread,)) for sign in (1, -1) * 4]


@pytest.mark.parametrize(("size", "tasks"), [(0.5, 34), (0.8, 15), (0.2, 199), (0.3, 90)])
def test_tasks_are_the_published_sample_sizes_of_a_paired_t_test(size: float, tasks: int) -> None:
    """G*Power: two-sided, alpha 0.05, power 0.8; the quantiles added up are off by one at most."""
    found = find_remedy(_effect(size), alpha=0.05)
    assert found.tasks is not None
    assert abs(found.tasks - tasks) <= 1
    assert _power(size, found.tasks) > 0.79
    assert _power(size, found.tasks - 1) < 0.81


def _power(size: float, tasks: int) -> float:
    """Exact, by the noncentral t distribution."""
    limit, shift = scipy.stats.t.ppf(0.975, tasks - 1), size * math.sqrt(tasks)
    return float(scipy.stats.nct.sf(limit, tasks - 1, shift) + scipy.stats.nct.cdf(-limit, tasks - 1, shift))


def _varied(passed: Sequence[tuple[int, int]], attempts: int) -> Pairs:
    def rewards(count: int) -> list[float]:
        return [1.0] * count + [0.0] * (attempts - count)

    return [(rewards(a), rewards(b)) for a, b in passed]


NOISY = [(1, 3), (2, 2), (2, 3), (3, 2), (1, 2), (2, 1), (2, 3), (3, 3), (2, 2), (1, 3)]


def test_attempts_are_enough_and_not_more_than_needed() -> None:
    pairs = _varied(NOISY, 4)
    found = find_remedy(pairs, alpha=0.05)
    assert found.attempts is not None
    assert found.attempts > 4
    within = mean([scipy.stats.tvar(a) + scipy.stats.tvar(b) for a, b in pairs])
    differences = [mean(b) - mean(a) for a, b in pairs]
    between = max(0.0, scipy.stats.tvar(differences) - within / 4)
    needed = sum(scipy.stats.t.ppf(q, 9) for q in (0.975, 0.8))

    def is_enough(attempts: int) -> bool:
        return abs(mean(differences)) >= needed * math.sqrt((between + within / attempts) / 10)

    assert is_enough(found.attempts)
    assert not is_enough(found.attempts - 1)


def test_where_the_difference_itself_varies_only_tasks_help() -> None:
    pairs = _varied([(0, 16), (16, 0), (0, 16), (16, 0), (0, 16), (8, 8), (0, 16), (16, 0)], 16)
    found = find_remedy(pairs, alpha=0.05)
    assert (found.attempts, found.obstacle) == (None, Obstacle.TASKS_VARY)
    assert found.tasks is not None
    assert found.tasks > 8


def test_single_attempts_do_not_tell_how_much_they_vary() -> None:
    pairs = _varied([(0, 1), (1, 0), (0, 1), (0, 1), (1, 1), (0, 0), (1, 1)], 1)
    found = find_remedy(pairs, alpha=0.05)
    assert (found.attempts, found.obstacle) == (None, Obstacle.SINGLE_ATTEMPTS)
    assert found.tasks is not None


@pytest.mark.parametrize(("tasks", "obstacle"), [(5, Obstacle.TOO_FEW_TASKS), (6, None)])
def test_five_tasks_never_reach_five_per_cent(tasks: int, obstacle: Obstacle | None) -> None:
    """Two of 2^5 choices of signs are more than that."""
    pairs = _varied([(0, 2), (1, 4), (0, 3), (1, 2), (2, 3), (1, 3)][:tasks], 4)
    found = find_remedy(pairs, alpha=0.05)
    assert found.obstacle is obstacle
    assert found.tasks is not None
    assert found.tasks >= 6


def test_what_was_not_seen_needs_no_number() -> None:
    same = find_remedy(_varied([(2, 2)] * 7, 4), alpha=0.05)
    assert (same.attempts, same.tasks, same.obstacle, same.detectable) == (None, None, Obstacle.NO_DIFFERENCE, None)
    even = find_remedy(_varied([(1, 3), (3, 1)] * 4, 4), alpha=0.05)
    assert even.obstacle is Obstacle.NO_DIFFERENCE
    assert even.detectable == pytest.approx(
        sum(scipy.stats.t.ppf(q, 7) for q in (0.975, 0.8)) * math.sqrt(0.25 * 8 / 7 / 8)
    )


def test_a_stricter_limit_needs_more() -> None:
    easy, strict = (find_remedy(_varied(NOISY, 4), alpha=alpha) for alpha in (0.1, 0.01))
    assert easy.tasks is not None
    assert strict.tasks is not None
    assert strict.tasks > easy.tasks


def test_one_task_alone_settles_nothing() -> None:
    found = find_remedy(_varied([(1, 3)], 4), alpha=0.05)
    assert (found.attempts, found.tasks, found.obstacle) == (None, None, Obstacle.TOO_FEW_TASKS)


def test_no_more_is_advised_than_there_is() -> None:
    """Where the t-test would be significant and the exact one is not, what there is has not been enough."""
    rng, advised = random.Random(2), 0
    for _ in range(1500):
        attempts = rng.choice([2, 3, 4])
        odds = rng.random()
        passed = [
            (rng.randint(0, 1), sum(rng.random() < odds for _ in range(attempts))) for _ in range(rng.randint(4, 9))
        ]
        pairs = _varied(passed, attempts)
        p = sign_flip_p([mean(b) - mean(a) for a, b in pairs])
        if p < 0.05:
            continue
        found = find_remedy(pairs, alpha=0.05, p=p)
        advised += found.tasks is not None
        assert found.attempts is None or found.attempts > attempts, passed
        assert found.tasks is None or found.tasks > len(pairs), passed
    assert advised > 100
