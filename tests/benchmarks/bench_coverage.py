"""How often the 95 % intervals hold the true value, by simulation.

Run by hand: `python -m tests.benchmarks.bench_coverage`. Each row is a world: so many tasks, each with a probability to
pass of its own, drawn from a Beta distribution with the given mean and intraclass correlation (0: all tasks are alike;
1: each passes always or never), and so many attempts at each. Printed are the share of simulated runs whose interval
holds the truth, for the mean reward, pass@k and pass^k, beside what Wilson's interval over independent attempts would
have held; then for two runs that are alike, in seven of ten tasks with the same probability: how often the interval of
the difference holds 0, and how often the p-value is below 0.05.

A second table is of settings that are repeated with several seeds, one attempt at each task per seed: the share of
sweeps whose interval over tasks and seeds contains the true mean. In its last rows all tasks of a seed share an effect,
as with checkpoints of several training runs, which such an interval does not contain.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ares_exp.records.results import EpisodeResult, Outcome, RunSummary
from ares_exp.records.statistics.comparison import Difference
from ares_exp.records.statistics.estimate import Estimate, mean, mean_over_attempts, wilson
from ares_exp.records.statistics.run_statistics import RunStatistics, ks_up_to, pass_rates
from ares_exp.runs.sweeps.sweep_report import pooled

REPETITIONS = 2000


@dataclass(frozen=True, slots=True)
class World:
    """Where the tasks come from, and how many are run how often."""

    tasks: int
    attempts: int
    mean: float
    correlation: float

    @property
    def k(self) -> int:
        ks = ks_up_to(self.attempts)
        return ks[len(ks) // 2]

    def probability(self, rng: random.Random) -> float:
        if not self.correlation:
            return self.mean
        size = 1 / self.correlation - 1
        return rng.betavariate(self.mean * size, (1 - self.mean) * size)

    def true_pass_at_k(self) -> float:
        return 1 - _moment(1 - self.mean, self.correlation, self.k)

    def true_pass_hat_k(self) -> float:
        return _moment(self.mean, self.correlation, self.k)


@dataclass(slots=True)
class Coverage:
    mean_reward: float = 0.0
    pass_at_k: float = 0.0
    pass_hat_k: float = 0.0
    independent: float = 0.0
    difference: float = 0.0
    false_alarms: float = 0.0


def simulate(world: World, *, repetitions: int, seed: int = 0) -> Coverage:
    """Runs the runs; the same seed gives the same shares."""
    rng = random.Random(f"{world} {seed}")
    found = Coverage()
    for _ in range(repetitions):
        probabilities = [world.probability(rng) for _ in range(world.tasks)]
        rewards = _execute(probabilities, world, rng)
        counts = [(len(own), int(sum(own))) for own in rewards]
        rate = pass_rates(counts, [world.k])[0]
        others = [one if rng.random() < 0.7 else world.probability(rng) for one in probabilities]
        pairs = zip(rewards, _execute(others, world, rng), strict=True)
        difference = Difference.of([mean(b) - mean(a) for a, b in pairs], is_bounded=True)
        total = world.tasks * world.attempts
        low, high = wilson(sum(map(sum, rewards)) / total, total)
        assert difference is not None
        found.mean_reward += _holds(mean_over_attempts(rewards), world.mean) / repetitions
        found.pass_at_k += _holds(rate.pass_at_k, world.true_pass_at_k()) / repetitions
        found.pass_hat_k += _holds(rate.pass_hat_k, world.true_pass_hat_k()) / repetitions
        found.independent += (low <= world.mean <= high) / repetitions
        found.difference += _holds(difference, 0.0) / repetitions
        found.false_alarms += (difference.p < 0.05) / repetitions
    return found


def simulate_seeds(world: World, *, seeds: int, effect: float = 0.0, repetitions: int, seed: int = 0) -> float:
    """Repeats a setting with several seeds; returns how often the interval contains the true mean.

    Args:
        world: The tasks, and the attempts at each of them per seed.
        seeds: The number of seeds.
        effect: The standard deviation of what a seed adds to the probabilities of all of its tasks.
        repetitions: The number of simulated sweeps.
        seed: The seed of the simulation.
    """
    rng = random.Random(f"{world} {seeds} {effect} {seed}")
    held = 0
    for _ in range(repetitions):
        tasks = [world.probability(rng) for _ in range(world.tasks)]
        runs = []
        for _ in range(seeds):
            shift = rng.gauss(0, effect) if effect else 0.0
            rewards = _execute([one + shift for one in tasks], world, rng)
            results = [
                EpisodeResult("any", f"{number}", attempt, 0, Outcome.COMPLETED, reward)
                for number, own in enumerate(rewards)
                for attempt, reward in enumerate(own)
            ]
            runs.append(RunSummary(len(results), tuple(results)))
        found = pooled(runs)
        statistics = RunStatistics.of(found.results, planned=found.planned)
        held += _holds(statistics.errors_as_zero.mean_reward, world.mean)
    return held / repetitions


def _execute(probabilities: list[float], world: World, rng: random.Random) -> list[list[float]]:
    return [[float(rng.random() < one) for _ in range(world.attempts)] for one in probabilities]


def _holds(found: Estimate | Difference | None, truth: float) -> bool:
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return found.low - 1e-9 <= truth <= found.high + 1e-9


def _moment(center: float, correlation: float, k: int) -> float:
    if not correlation:
        return center**k
    size, product_of_ratios = 1 / correlation - 1, 1.0
    for i in range(k):
        product_of_ratios *= (center * size + i) / (size + i)
    return product_of_ratios


def worlds() -> Iterator[World]:
    for tasks, attempts, center, correlation in product((3, 6, 20, 100), (1, 4, 8), (0.5, 0.8, 0.95), (0, 0.3, 0.8)):
        if tasks * attempts < 800:
            yield World(tasks, attempts, center, correlation)


def main() -> None:
    print(
        "| tasks | attempts | mean | correlation | mean reward | pass@k | pass^k | k | independent | difference | p |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    all_found = []
    for world in worlds():
        found = simulate(world, repetitions=REPETITIONS)
        all_found.append(found)
        print(
            f"| {world.tasks} | {world.attempts} | {world.mean} | {world.correlation} | {found.mean_reward:.3f} | "
            f"{found.pass_at_k:.3f} | {found.pass_hat_k:.3f} | {world.k} | {found.independent:.3f} | "
            f"{found.difference:.3f} | {found.false_alarms:.3f} |",
            flush=True,
        )
    for name in ("mean_reward", "pass_at_k", "pass_hat_k", "difference", "independent"):
        shares = [getattr(found, name) for found in all_found]
        print(f"{name}: least {min(shares):.3f}, mean {mean(shares):.3f}")
    print(f"false_alarms: most {max(found.false_alarms for found in all_found):.3f}")
    print("| seeds | tasks | mean | correlation | effect of a seed | mean reward |")
    print("|---|---|---|---|---|---|")
    for center, correlation, effect in [
        *product((0.5, 0.8, 0.95), (0, 0.1, 0.3, 0.8), (0.0,)),
        *((0.5, 0.3, effect) for effect in (0.05, 0.1, 0.2)),
    ]:
        held = simulate_seeds(World(20, 1, center, correlation), seeds=4, effect=effect, repetitions=REPETITIONS)
        print(f"| 4 | 20 | {center} | {correlation} | {effect} | {held:.3f} |", flush=True)


if __name__ == "__main__":
    main()
