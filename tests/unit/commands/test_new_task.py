"""The task that a template makes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.commands.task import FILES, IMAGE, TEMPLATE, make_task
from ares_exp.errors import ConfigError
from ares_exp.tasks.harbor_task import load_task


def test_it_is_a_valid_task_without_warnings(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "my-task", image="python:3.12-slim")
    root = tmp_path / "tasks" / "my-task"
    task = load_task(root)
    task.check_runnable(needs_solution=True)
    assert task.name == "my-task"
    assert task.warnings == ()
    assert task.stages[0].instruction.startswith("The file `/app/numbers.txt`")
    dockerfile = (root / "environment" / "Dockerfile").read_text()
    assert "\nFROM python:3.12-slim\n" in dockerfile
    assert IMAGE not in dockerfile
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == set(FILES)
    assert (root / "tests" / "test.sh").stat().st_mode & 0o111


def test_an_empty_folder_is_filled_and_one_with_files_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_task(tmp_path / "empty")
    assert load_task(tmp_path / "empty").name == "empty"
    (tmp_path / "empty" / "instruction.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"empty has files\. Choose another folder"):
        make_task(tmp_path / "empty")
    assert (tmp_path / "empty" / "instruction.md").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file"):
        make_task(tmp_path / "file")


@pytest.mark.parametrize("name", ["a b", "..", "-x", "fix-*", "ä"])
def test_a_folder_that_is_no_name_of_a_task_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a valid task name"):
        make_task(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_image_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of an image, got 'debian\\\\nRUN x'"):
        make_task(tmp_path / "task", image="debian\nRUN x")


def test_every_file_of_the_template_is_described() -> None:
    assert {str(path.relative_to(TEMPLATE)) for path in TEMPLATE.rglob("*") if path.is_file()} == set(FILES)
