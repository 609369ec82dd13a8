"""Links in a local task folder that lead to files of the host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import TaskError
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_files import digested_files
from ares_exp.tasks.task_set import load_task_set
from ares_exp.tasks.verification.link_bounds import LinkBounds

MakeTask = Callable[..., Path]

READ_FILES = [
    "instruction.md",
    "task.toml",
    "trajectory.json",
    "README.md",
    ".gitignore",
    "environment",
    "environment/Dockerfile",
    "environment/docker-compose.yaml",
    "environment/.dockerignore",
    "environment/.env",
]
COMPOSED = {"environment/docker-compose.yaml": "services: {main: {}}\n"}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder next to the folder of tasks, with a file that works in the place of each file of a task."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("")
    (folder / "environment").mkdir()
    return folder


def absolute_link(link: Path, target: Path) -> None:
    link.symlink_to(target)


def relative_link(link: Path, target: Path) -> None:
    link.symlink_to(os.path.relpath(target, link.parent))


def link_to_a_link(link: Path, target: Path) -> None:
    between = link.parent / "between"
    between.symlink_to(target)
    link.symlink_to("between")


def link_through_a_directory(link: Path, target: Path) -> None:
    (link.parent / "directory").symlink_to(target.parent)
    link.symlink_to(f"directory/{target.name}")


def replace(path: Path) -> Path:
    """Removes what is at `path`, to put a link there."""
    if path.is_dir():
        path.rename(path.with_name("before"))
    else:
        path.unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("make_link", [absolute_link, relative_link, link_to_a_link, link_through_a_directory])
@pytest.mark.parametrize("name", READ_FILES)
def test_links_out_of_a_task_are_rejected(
    make_task: MakeTask, outside: Path, name: str, make_link: Callable[[Path, Path], None]
) -> None:
    other, root = make_task("other"), make_task(files=COMPOSED)
    target = outside / ("environment" if name == "environment" else "secret")
    make_link(replace(root / name), target)
    with pytest.raises(TaskError, match=f"expected a link to a place inside the task, found a link to {outside}"):
        load_task(root)
    found = load_task_set(root.parent)
    assert [task.path for task in found.tasks] == [other]
    [skipped] = found.skipped
    assert f"inside the task or inside {root.parent}, found a link to {outside}" in skipped.reason
    assert str(root / name) in skipped.reason or name == "environment/.env"  # or the other link next to it


@pytest.mark.parametrize("name", ["instruction.md", "environment", "environment/Dockerfile"])
@pytest.mark.parametrize("named", ["real", "link", "behind a link"])
def test_tasks_may_share_files_inside_the_named_folder(
    make_task: MakeTask, tmp_path: Path, name: str, named: str
) -> None:
    root, shared = make_task(), tmp_path / "tasks" / "shared"
    shared.mkdir()
    (root / name).rename(shared / Path(name).name)
    relative_link(root / name, shared / Path(name).name)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "linked-tasks").symlink_to("tasks")
    path = {"real": "tasks", "link": "linked-tasks", "behind a link": "link/tasks"}[named]
    [task] = load_task_set(tmp_path / path).tasks
    assert task.stages[0].instruction == "Do it.\n"
    assert task.container_spec.context_dir is not None
    assert (task.container_spec.context_dir / "Dockerfile").read_text().startswith("FROM debian")
    assert task.digest == load_task(root, links_within=root.parent).digest
    with pytest.raises(TaskError, match=f"{name}: expected a link to a place inside the task, found"):
        load_task(root)
    with pytest.raises(TaskError, match=f"{name}: expected a link to a place inside the task, found"):
        load_task_set(root)


def test_tasks_of_a_registry_share_files_inside_the_named_folder(make_task: MakeTask, tmp_path: Path) -> None:
    root, registry = make_task(), tmp_path / "registry.json"
    (root / "instruction.md").rename(root.parent / "shared.md")
    (root / "instruction.md").symlink_to("../shared.md")
    row = {"name": "d", "version": "1", "description": "", "tasks": [{"name": "a-task", "path": str(root)}]}
    registry.write_text(json.dumps([row]))
    with pytest.raises(TaskError, match=r"instruction\.md: expected a link to a place inside the task, found"):
        HarborEnvironments(registry=registry, dataset="d").load(print)
    assert HarborEnvironments(registry=registry, dataset="d", path=root.parent).load(print) == ["a-task"]


def test_a_task_behind_a_link_loads(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task()
    (root / "instruction.md").rename(root / "text.md")
    (root / "instruction.md").symlink_to("text.md")
    (tmp_path / "link").symlink_to(root)
    assert load_task_set(tmp_path / "link").tasks[0].stages[0].instruction == "Do it.\n"


def test_the_digest_reads_no_file_outside(make_task: MakeTask, outside: Path) -> None:
    root = make_task()
    (root / "environment" / "data").symlink_to(outside / "secret")
    before = load_task(root).digest
    (outside / "secret").write_text("changed")
    assert load_task(root).digest == before
    assert "environment/data" not in digested_files(LinkBounds(root))  # the files that the tracker uploads


@pytest.mark.parametrize("swapped", ["instruction.md", "texts"])
def test_a_link_put_in_place_later_is_not_followed(
    make_task: MakeTask, outside: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    root = make_task(files={"instruction.md": None, "texts/secret": "Do it.\n"})
    (root / "instruction.md").symlink_to("texts/secret")
    resolve = os.path.realpath

    def resolve_then_swap(path: Path) -> str:
        real = resolve(path)
        replace(root / "texts" / "secret" if swapped == "instruction.md" else root / "texts").symlink_to(
            outside / "secret" if swapped == "instruction.md" else outside
        )
        return real

    assert LinkBounds(root).read_text(root / "instruction.md") == "Do it.\n"
    monkeypatch.setattr(os.path, "realpath", resolve_then_swap)
    with pytest.raises(OSError, match=r"secret|texts"):
        LinkBounds(root).read_text(root / "instruction.md")


@pytest.mark.parametrize("target", [".", "tests", "fifo", "instruction.md"])
def test_only_regular_files_are_read(make_task: MakeTask, target: str) -> None:
    root = make_task(files={"instruction.md": None})
    os.mkfifo(root / "fifo")
    (root / "instruction.md").symlink_to(target)
    with pytest.raises(TaskError, match=r"not a regular file|expected the text that the agent is given"):
        load_task(root)
