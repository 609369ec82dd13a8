"""Checkpoints: whole or not there, and the last ones alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.training.checkpoints import STATE, Checkpoints


def save(checkpoints: Checkpoints, step: int, weights: str = "weights") -> None:
    with checkpoints.appearing(step, {"version": str(step)}) as staging:
        folder = staging / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model").write_text(weights)


def fail_while_writing(checkpoints: Checkpoints) -> None:
    before = checkpoints.found()
    with checkpoints.appearing(2, {}) as staging:
        (staging / "checkpoint-2").mkdir()
        assert checkpoints.found() == before
        raise ZeroDivisionError


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.found() == []
    for step in (2, 4, 10):
        save(checkpoints, step)
    assert [(one.step, one.state()) for one in checkpoints.found()] == [
        (4, {"version": "4", "step": 4}),
        (10, {"version": "10", "step": 10}),
    ]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["checkpoint-10", "checkpoint-4"]


def test_incomplete_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Neither one that is being written, nor what is left where that failed or the process was killed."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    with pytest.raises(ZeroDivisionError):
        fail_while_writing(checkpoints)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]

    (tmp_path / ".saving" / "checkpoint-2").mkdir(parents=True)  # of a process that was killed while it wrote
    (tmp_path / ".saving" / "checkpoint-2" / "model").write_text("half")
    (tmp_path / "checkpoint-9").mkdir()  # without the state, which is written last
    assert [one.step for one in checkpoints.found()] == [1]
    save(checkpoints, 2)
    assert (tmp_path / "checkpoint-2" / "model").read_text() == "weights"
    assert not (tmp_path / ".saving").exists()


def test_repeated_step_overwrites_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 3, "earlier")
    save(checkpoints, 3, "later")
    [found] = checkpoints.found()
    assert (found.path / "model").read_text() == "later"
    assert (found.path / STATE).is_file()
