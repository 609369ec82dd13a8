from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from ares_exp.config.schema import ExperimentConfig, validate
from ares_exp.errors import ConfigError


def config(**changes: Any) -> dict[str, Any]:
    values = {**asdict(ExperimentConfig()), "budget": {}, "retry": {}}
    for key, value in changes.items():
        node, _, name = key.rpartition(".")
        (values[node] if node else values)[name] = value
    return values


def test_the_defaults_are_valid() -> None:
    validate(config())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attempts", 0, "at least 1"),
        ("concurrency", -3, "at least 1"),
        ("seed", -1, "at least 0"),
        ("limits.cost", 0.0, "above 0"),
        ("timeouts.multiplier", -1.0, "above 0"),
        ("timeouts.multiplier", float("inf"), "above 0"),
        ("timeouts.multiplier", float("nan"), "above 0"),
        ("timeouts.policy", 0.0, "above 0"),
        ("reward_threshold", float("nan"), "a finite number, got nan"),
        ("budget", 5, "Set `budget.KEY=…`"),
        ("resume_redo", ["lost", "policy_eror"], "got 'policy_eror'. Did you mean `policy_error`"),
        ("name", "", "folder name"),
        ("name", "..", "folder name"),
        ("name", "a/b", "folder name"),
    ],
)
def test_a_value_out_of_range(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        validate(config(**{key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["limits.steps", "limits.tokens", "limits.cost", "timeouts.agent", "timeouts.policy"])
def test_null_is_no_limit(key: str) -> None:
    validate(config(**{key: None}))


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="`attempts`"):
        validate(config(attemps=2))
