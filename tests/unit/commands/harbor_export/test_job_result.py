"""Metrics and names of an exported job, number by number."""

import pytest

from ares_exp.commands.harbor_export import mean_rewards, pass_rates, stable_id, trial_name


def test_mean_of_one_key_is_called_mean() -> None:
    assert mean_rewards([{"reward": 1.0}, None, {}]) == {"mean": pytest.approx(1 / 3)}
    assert mean_rewards([{"accuracy": 1.0}]) == {"mean": 1.0}
    assert mean_rewards([None]) == {"mean": 0.0}
    assert mean_rewards([{"a": 1.0, "b": 2.0}, {"b": 4.0}, None]) == {"a": pytest.approx(1 / 3), "b": 2.0}


@pytest.mark.parametrize(
    ("passed", "attempts", "expected"),
    [
        (1, 1, {}),
        (1, 2, {"2": 1.0}),
        (0, 3, {"2": 0.0}),
        (1, 4, {"2": 0.5, "4": 1.0}),
        (1, 11, {"2": 2 / 11, "4": 4 / 11, "5": 5 / 11, "8": 8 / 11, "10": 10 / 11}),
    ],
)
def test_pass_rates_are_computed_per_k(passed: int, attempts: int, expected: dict[str, float]) -> None:
    assert pass_rates({}) == {}
    each = [number < passed for number in range(attempts)]
    assert pass_rates({"a": each}) == pytest.approx(expected)
    assert pass_rates({"a": each, "b": [False] * (attempts + 1)}) == pytest.approx(
        {k: value / 2 for k, value in expected.items()}
    )


def test_trial_names_are_short_and_unique() -> None:
    assert trial_name("org/a" * 10, "x") != trial_name("org/a" * 10, "y")
    head, _, drawn = trial_name("some/long-name-of-a-task-that-is-cut__-here", "x").rpartition("__")
    assert (head, len(drawn)) == ("long-name-of-a-task-that-is-cut", 7)
    assert trial_name("..", "x").startswith("task__")
    assert trial_name("ä b", "\udc80").startswith("--b__")


def test_ids_are_stable() -> None:
    assert stable_id("run") == stable_id("run") != stable_id("run", "episode")
