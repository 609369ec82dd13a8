"""Tasks with files of Git LFS that are not there are told by name, wherever they lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import TaskError
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


def load(**options: object) -> list[str]:
    source = HarborEnvironments(**options)  # type: ignore[arg-type]
    source.load(print)
    return [task.name for task in source.tasks]


def test_in_a_local_folder(repository: Repository) -> None:
    tasks = repository.path / "tasks"
    told = (
        r"bad: .*/bad: .* Git LFS: environment/a\.bin, environment/b\.bin, environment/c\.bin and 1 more\. .*lfs pull"
    )
    with pytest.raises(TaskError, match=rf"(?s){told}.*To play the others: env\.exclude=\[bad\]\."):
        load(path=tasks)
    assert load(path=tasks, exclude="bad") == ["good"]
    with pytest.raises(TaskError, match="pointers to files in Git LFS"):
        load(path=tasks / "bad")


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
