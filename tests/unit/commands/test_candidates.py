"""Which folders are checked, and what keeps tasks from being run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ares_exp.commands.task import make_task
from ares_exp.commands.task_runs import find_candidates, with_problems
from ares_exp.config.hydra_setup import compose_config
from ares_exp.errors import ConfigError


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        make_task(tmp_path / "tasks" / name)
    (tmp_path / "tasks" / "notes").mkdir()
    return tmp_path / "tasks"


def test_a_task_and_a_folder_of_tasks(tasks: Path) -> None:
    assert [one.name for one in find_candidates([tasks / "b"])] == ["b"]
    assert [one.name for one in find_candidates([tasks])] == ["a", "b"]
    assert [one.name for one in find_candidates([tasks, tasks / "a"])] == ["a", "b"]
    assert [one.problem for one in find_candidates([tasks])] == [None, None]


def test_a_broken_task_is_one_with_a_problem(tasks: Path) -> None:
    (tasks / "a" / "tests" / "test.sh").unlink()
    (tasks / "b" / "task.toml").unlink()
    make_task(tasks / "c")
    (tasks / "c" / "instruction.md").write_text("\n")
    broken = {one.name: one.problem or "" for one in find_candidates([tasks])}
    assert "tests/test.sh: expected the script" in broken["a"]
    assert "task.toml" in broken["b"]
    assert "instruction.md is empty. Write in it" in broken["c"]
    [alone] = find_candidates([tasks / "b"])
    assert alone.name == "b"
    assert alone.problem is not None


def test_what_the_containers_the_agent_and_the_oracle_object_to(tasks: Path) -> None:
    make_task(tasks / "c")
    make_task(tasks / "d")
    shutil.rmtree(tasks / "a" / "solution")
    (tasks / "b" / "environment" / "docker-compose.yaml").write_text("services: {main: {image: x}}\n")
    (tasks / "c" / "task.toml").write_text('[[environment.mcp_servers]]\nname = "s"\nurl = "http://s"\n')
    config = compose_config(["container=local"])
    found = {one.name: one.problem or "" for one in with_problems(find_candidates([tasks]), config)}
    assert "expected the task's solution, found no file. Write one" in found["a"]
    assert "container=docker" in found["b"]
    assert "this agent cannot use" in found["c"]
    assert found["d"] == ""


def test_paths_without_tasks_are_refused(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="found no such folder"):
        find_candidates([tasks / "nothing"])
    with pytest.raises(ConfigError, match=r"has a task\.toml"):
        find_candidates([tasks / "notes"])
    shutil.copytree(tasks / "a", tasks / "notes" / "a")
    with pytest.raises(ConfigError, match="several are named a"):
        find_candidates([tasks, tasks / "notes"])


def test_tasks_share_files_inside_the_only_folder(tasks: Path) -> None:
    (tasks / "a" / "environment").rename(tasks / "notes" / "environment")
    (tasks / "a" / "environment").symlink_to("../notes/environment")
    assert [one.problem for one in find_candidates([tasks])] == [None, None]
    for paths in ([tasks / "a"], [tasks, tasks / "b"]):
        assert "found a link to" in (find_candidates(paths)[0].problem or "")
