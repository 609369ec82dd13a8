"""Tasks with files of Git LFS that are not there are told by name, wherever they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.task_sources.git_repository import has_lfs
from tests.unit.tasks.task_sources.conftest import MakeRepository, Repository

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"


@pytest.fixture
def repository(make_repository: MakeRepository) -> Repository:
    """Of the tasks `good`, and `bad` with pointers."""
    found = make_repository("tasks/good")
    pointers = {f"environment/{name}.bin": POINTER for name in "dcba"}
    found.add_task("tasks/bad", {**pointers, "environment/like.txt": POINTER.ljust(2000, "x")})
    found.commit()
    return found


def load(report: Callable[[str], None] = print, **options: object) -> list[str]:
    source = HarborEnvironments(**options)  # type: ignore[arg-type]
    source.load(report)
    return [task.name for task in source.tasks]


def test_in_a_local_folder(repository: Repository) -> None:
    tasks = repository.path / "tasks"
    (tasks / "amiss").mkdir()
    told: list[str] = []
    assert load(told.append, path=tasks) == ["good"]
    pointers = "environment/a.bin, environment/b.bin, environment/c.bin and 1 more. "
    assert [text.partition("task:")[0] for text in told] == ["amiss: skipped, no valid ", "bad: skipped, no valid "]
    assert f"/bad: expected files, got pointers to files in Git LFS: {pointers}" in told[1]
    assert "git lfs pull" in told[1]
    with pytest.raises(ConfigError, match=r"Expected `env\.tasks` to match a task, got 'bad'"):
        load(path=tasks, tasks="bad")
    with pytest.raises(TaskError, match="pointers to files in Git LFS"):
        load(path=tasks / "bad")
    (tasks / "good" / "instruction.md").write_text(POINTER)
    with pytest.raises(TaskError, match=r"(?s)amiss: .*\nbad: .*LFS.*\ngood: .*LFS: instruction\.md"):
        load(path=tasks)


def test_in_a_registry(repository: Repository, tmp_path: Path) -> None:
    tasks = [{"name": name, "path": str(repository.path / "tasks" / name)} for name in ("good", "bad")]
    file = tmp_path / "registry.json"
    file.write_text(json.dumps([{"name": "set", "version": "1", "description": "", "tasks": tasks}]))
    with pytest.raises(TaskError, match=r"bad: .*pointers to files in Git LFS"):
        load(registry=file, dataset="set")


@pytest.mark.skipif(has_lfs(), reason="git-lfs is installed")
def test_in_a_repository_without_the_program(repository: Repository, cache_dir: Path) -> None:
    with pytest.raises(TaskError, match=r"bad: .* Git LFS: environment/a\.bin, .* and 1 more\. Install"):
        load(repo=repository.url, cache_dir=cache_dir)
    assert load(repo=repository.url, cache_dir=cache_dir, exclude="bad") == ["good"]
