from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.runs.sweeps.plan import SweepPlan, varied


def plan(*jobs: str) -> SweepPlan:
    return SweepPlan(len(jobs), jobs=tuple(tuple(job.split()) for job in jobs))


def test_what_varies() -> None:
    assert varied([["name=x", "seed=1"], ["name=x", "seed=2", "resume=true"], ["name=x", "seed=1"]]) == ["seed"]
    assert varied([["a=1"], ["b=1"]]) == ["a", "b"], "what one has and another has not"
    assert varied([["a=1"]]) == []


@pytest.mark.parametrize(
    "now",
    [
        plan("seed=1 limits.steps=8", "seed=2 limits.steps=8"),
        plan("concurrency=8 seed=1 limits.steps=9 resume=true", "concurrency=8 seed=2 limits.steps=9 resume=true"),
    ],
)
def test_the_same_jobs_go_on(now: SweepPlan) -> None:
    now.check_continues(plan("seed=1 limits.steps=8", "seed=2 limits.steps=8"))
    now.check_continues(SweepPlan())


@pytest.mark.parametrize(
    ("now", "number"),
    [
        (plan("seed=1", "seed=3"), 1),
        (plan("seed=2", "seed=1"), 0),
        (plan("seed=1"), 1),
        (plan("seed=1", "seed=2", "seed=3"), 2),
        (plan("seed=1 limits.steps=8", "seed=1 limits.steps=9", "seed=2 limits.steps=8", "seed=2 limits.steps=9"), 0),
    ],
)
def test_other_jobs_do_not(now: SweepPlan, number: int) -> None:
    with pytest.raises(ConfigError, match=rf"its job {number} is "):
        now.check_continues(plan("seed=1", "seed=2"))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = SweepPlan(2, "pass@2", minimize=True, jobs=(("seed=1",), ("seed=2",)))
    written.write(tmp_path)
    assert SweepPlan.read(tmp_path) == written
    assert SweepPlan.read(tmp_path / "elsewhere") == SweepPlan()
