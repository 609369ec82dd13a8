"""Which tasks are drawn next, and which groups of attempts teach something."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.training.curriculum import Curriculum, Weighting, teaches_nothing

TASKS = ("easy", "half", "hard")


def ran(weighting: Weighting, **options: float) -> Curriculum:
    curriculum = Curriculum(TASKS, weighting=weighting, decay=1.0, **options)  # type: ignore[arg-type]
    for _ in range(10):
        curriculum.add("easy", [1.0] * 8)
        curriculum.add("half", [1.0, 0.0] * 4)
        curriculum.add("hard", [0.0] * 8)
    return curriculum


@pytest.mark.parametrize(("weighting", "most"), [("uniform", None), ("learnability", "half"), ("difficulty", "hard")])
def test_weighting_prefers_suitable_tasks(weighting: Weighting, most: str | None) -> None:
    curriculum = ran(weighting)
    drawn = Counter(curriculum.draw(1, step=step)[0] for step in range(600))
    assert set(drawn) == set(TASKS)  # none is forgotten
    if most is None:
        assert max(drawn.values()) < 1.3 * min(drawn.values())
    else:
        assert drawn.most_common(1)[0][0] == most
        assert drawn["easy"] < 600 / 6


def test_every_task_is_drawn_before_repetitions() -> None:
    drawn = ran("learnability").draw(7, step=3)
    assert set(drawn[:3]) == set(drawn[3:6]) == set(TASKS)


def test_older_attempts_have_less_weight() -> None:
    curriculum = Curriculum(["task"], decay=0.5)
    for _ in range(10):
        curriculum.add("task", [0.0] * 8)
    assert curriculum.pass_rate("task") < 0.1
    for _ in range(3):
        curriculum.add("task", [1.0] * 8)
    assert curriculum.pass_rate("task") > 0.7


def test_resumed_curriculum_draws_the_same_tasks() -> None:
    curriculum, again = ran("learnability"), Curriculum(TASKS, weighting="learnability", decay=1.0)
    again.restore({**curriculum.state(), "gone": [1.0, 2.0]})
    assert [again.draw(2, step=n) for n in range(20)] == [curriculum.draw(2, step=n) for n in range(20)]
    assert curriculum.draw(5, step=1, part=1) != curriculum.draw(5, step=1)


def test_curriculum_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one task to train on, got none"):
        Curriculum([])


@pytest.mark.parametrize(
    ("rewards", "nothing"),
    [([], True), ([0.5], True), ([1.0, 1.0], True), ([0.0, 1.0], False), ([0.1 + 0.2, 0.3], True)],
)
def test_uniform_groups_are_detected(rewards: list[float], nothing: bool) -> None:
    assert teaches_nothing(rewards) is nothing
