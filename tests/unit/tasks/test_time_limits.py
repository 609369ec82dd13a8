import math
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.episode_limits import TimeLimits
from ares_exp.errors import ConfigError
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.verification.step_setup import whole_seconds

CASES: list[tuple[dict[str, Any], str, str, float | None]] = [
    # limits, task.toml, phase, expected
    # only what is not among the cases of tests/compatibility
    ({}, "[agent]\ntimeout_sec = inf", "agent", None),
    ({"agent_timeout_sec": 0}, "[agent]\ntimeout_sec = 100", "agent", 100.0),
    ({"agent_timeout_max_sec": 0}, "[agent]\ntimeout_sec = 100", "agent", 100.0),
    ({"timeout_multiplier": 2, "agent_timeout_multiplier": 3}, "[agent]\ntimeout_sec = 100", "agent", 300.0),
    ({"timeout_multiplier": 2}, "", "agent", None),
    ({"verifier_timeout_sec": 10, "verifier_timeout_multiplier": 0.5}, "", "verifier", 5.0),
    ({"agent_timeout_sec": 1}, "", "verifier", 600.0),
    ({}, "[environment]\nbuild_timeout_sec = inf", "start", math.inf),
]


@pytest.mark.parametrize(("limits", "toml", "phase", "expected"), CASES)
def test_effective_limit_is_computed(
    make_task: Any, limits: dict[str, Any], toml: str, phase: str, expected: float | None
) -> None:
    task = load_task(make_task(toml=toml))
    limited = task if phase == "start" else task.stages[0]
    assert getattr(TimeLimits(**limits), phase)(limited) == expected


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"agent_timeout_sec": -1}, "`agent_timeout_sec` to be a number of seconds, 0 or more, got -1"),
        ({"verifier_timeout_max_sec": math.nan}, "`verifier_timeout_max_sec`.*got nan"),
        ({"timeout_multiplier": 0}, "`timeout_multiplier` to be a positive number, got 0"),
        ({"agent_timeout_multiplier": -2.0}, "`agent_timeout_multiplier`.*got -2.0"),
        ({"timeout_multiplier": math.inf}, "`timeout_multiplier`.*got inf"),
    ],
)
def test_impossible_limits_are_rejected(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TimeLimits(**limits)


def test_time_limit_may_be_infinite(tmp_path: Path) -> None:
    assert TimeLimits(agent_timeout_sec=math.inf).agent_timeout_sec == math.inf


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[agent]\ntimeout_sec = 100", 2 * (600 + 100 + 600) + 600),
        (
            "[agent]\ntimeout_sec = 100\n[environment.healthcheck]\ncommand = 'true'\nretries = 2\n"
            "[[verifier.collect]]\ncommand = 'true'\ntimeout_sec = 70",
            2 * (600 + 100 + 600) + (30 + 5 + 2 * (30 + 5)) + (600 + 70),
        ),
        (
            "[agent]\ntimeout_sec = 100\n[environment.healthcheck]\ncommand = 'true'\ntimeout_sec = inf",
            2 * (600 + 100 + 600) + 3600 + 600,
        ),
        ("[agent]\ntimeout_sec = inf", None),
        ("", None),
        ("[agent]\ntimeout_sec = 100\n[verifier]\ntimeout_sec = inf", None),
        ("[agent]\ntimeout_sec = 100\n[environment]\nbuild_timeout_sec = inf", None),
    ],
)
def test_container_lifetime_covers_all_limits(make_task: Any, toml: str, expected: float | None) -> None:
    task = load_task(make_task(toml=toml))
    assert TimeLimits(timeout_multiplier=2).container_spec(task).lifetime_sec == expected


def test_container_lifetime_adds_up_all_steps(make_task: Any) -> None:
    steps = "".join(f"[[steps]]\nname = '{name}'\n[steps.agent]\ntimeout_sec = 10\n" for name in ("one", "two"))
    files = {f"steps/{name}/instruction.md": "Do it." for name in ("one", "two")}
    task = load_task(make_task(toml=steps, files={**files, "steps/two/workdir/setup.sh": "true"}))
    assert TimeLimits().container_spec(task).lifetime_sec == 600 + 2 * (10 + 600 + 600) + 3600


def test_time_limits_are_rounded_to_seconds() -> None:
    limits = {1.9: 1.0, 30.0: 30.0, 1.0: 1.0, 0.9: None, 0.0: None, -5.0: None, float("inf"): None}
    assert {limit: whole_seconds(limit) for limit in limits} == limits
