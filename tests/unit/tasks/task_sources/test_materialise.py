"""Copies of tasks: what becomes of links, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ares_exp.errors import TaskError
from ares_exp.tasks.task_sources import materialise as module
from ares_exp.tasks.task_sources.materialise import materialise


@pytest.fixture
def task(tmp_path: Path) -> Path:
    root = tmp_path / "tree" / "task"
    (root / "tests" / "data").mkdir(parents=True)
    (root / "tests" / "test.sh").write_text("run\n")
    (root / "tests" / "test.sh").chmod(0o755)
    (root / "tests" / "data" / "rows").write_text("1\n")
    (tmp_path / "tree" / "outside").write_text("secret\n")
    (tmp_path / "tree" / "back").symlink_to("task/tests/test.sh")
    return root


def contents(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def test_links_become_what_they_mean(task: Path, tmp_path: Path) -> None:
    (task / "run.sh").symlink_to("tests/test.sh")
    (task / "again.sh").symlink_to("run.sh")
    (task / "solution").symlink_to("tests/data")
    materialise(task, tmp_path / "copy")
    expected = ("again.sh", "run.sh", "solution/rows", "tests/data/rows", "tests/test.sh")
    assert tuple(contents(tmp_path / "copy")) == expected
    assert not any(path.is_symlink() for path in (tmp_path / "copy").rglob("*"))
    assert os.access(tmp_path / "copy" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "copy" / "solution" / "rows", os.X_OK)


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("/etc/passwd", "tests/link: expected a relative link"),
        ("../../outside", "tests/link: expected a link that stays inside the task"),
        ("../../back", "stays inside"),  # it leads in again, by way of what may not be there another time
        ("nowhere", "tests/link: expected a link to something"),
        ("link", "tests/link: expected a link to something"),
        ("..", "tests/link: expected a link to a file, or to a folder without links"),
        (".", "tests/link: expected a link to a file, or to a folder without links"),
    ],
)
def test_links_that_are_refused(task: Path, tmp_path: Path, link: str, complaint: str) -> None:
    (task / "tests" / "link").symlink_to(link)
    with pytest.raises(TaskError, match=complaint):
        materialise(task, tmp_path / "copy")


def test_links_in_circles_are_refused(task: Path, tmp_path: Path) -> None:
    (task / "one").mkdir()
    (task / "two").mkdir()
    (task / "one" / "to").symlink_to("../two")
    (task / "two" / "to").symlink_to("../one")
    with pytest.raises(TaskError, match=r"(one|two)/to: expected"):
        materialise(task, tmp_path / "copy")


def test_a_link_out_by_way_of_a_folder_link_is_refused(task: Path, tmp_path: Path) -> None:
    (task / "deep" / "er").mkdir(parents=True)
    (task / "short").symlink_to("deep/er")
    (task / "deep" / "out").symlink_to("../short/../../../outside")
    with pytest.raises(TaskError, match="deep/out: expected a link"):
        materialise(task, tmp_path / "copy")


@pytest.mark.parametrize(("limit", "value"), [("MAX_ENTRIES", 3), ("MAX_BYTES", 5)])
def test_too_much_is_refused(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)
    (task / "more").symlink_to("tests")
    with pytest.raises(TaskError, match="expected at most"):
        materialise(task, tmp_path / "copy")
