"""Digests of a task's content, files that `.harborignore` leaves out, and links."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import TaskError, TransferError
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_files import UploadFilter, changed_files, content_of, digested_files, uploadable, with_files
from ares_exp.tasks.task_set import load_task_set
from ares_exp.tasks.verification.link_bounds import LinkBounds

MakeTask = Callable[..., Path]
Files = Mapping[str, str]

# What; the ignore files; what of these is left out.
PATHS = ("tests/a.log", "tests/keep.log", "tests/data/b.log", "tests/data/c.txt", "tests/data/deep/d.txt")
RULES: list[tuple[str, Files, set[str]]] = [
    ("none", {}, set()),
    ("a glob at any depth", {"tests/.harborignore": "*.log"}, {"tests/a.log", "tests/keep.log", "tests/data/b.log"}),
    ("a comment and a blank line", {"tests/.harborignore": "# a.log\n\n"}, set()),
    ("negation", {"tests/.harborignore": "*.log\n!keep.log"}, {"tests/a.log", "tests/data/b.log"}),
    ("the last line wins", {"tests/.harborignore": "!keep.log\nkeep.log"}, {"tests/keep.log"}),
    ("anchored", {"tests/.harborignore": "/b.log\n/a.log"}, {"tests/a.log"}),
    ("a directory", {"tests/.harborignore": "data/"}, set(PATHS[2:])),
    ("excluded directories cannot be re-included", {"tests/.harborignore": "data/\n!data/b.log"}, set(PATHS[2:])),
    ("all files except one", {"tests/.harborignore": "data/*\n!data/b.log"}, set(PATHS[3:])),
    ("the nearer file wins", {"tests/.harborignore": "*.log", "tests/data/.harborignore": "!b.log"},
     {"tests/a.log", "tests/keep.log"}),
    ("the nearer file adds", {"tests/data/.harborignore": "*.txt"}, {"tests/data/c.txt", "tests/data/deep/d.txt"}),
    ("rules of a directory apply only below it", {"tests/data/.harborignore": "*.log"}, {"tests/data/b.log"}),
    ("rules at the root of the task", {".harborignore": "*.log"}, set()),
    ("rules in the environment", {"environment/.harborignore": "*"}, set()),
    ("a directory pattern does not match a file", {"tests/.harborignore": "a.log/"}, set()),
]  # fmt: skip


@pytest.mark.parametrize("case", RULES, ids=[case[0] for case in RULES])
def test_ignore_rules_exclude_files(make_task: MakeTask, case: tuple[str, Files, set[str]]) -> None:
    _, ignores, left_out = case
    root = make_task(files={**dict.fromkeys(PATHS, ""), **ignores})
    chosen = UploadFilter(root)
    assert {path for path in PATHS if chosen.excludes(root / path)} == left_out
    assert all(chosen.excludes(root / path) for path in ignores)
    assert not chosen.excludes(root / "environment" / "Dockerfile")
    listed = set(digested_files(LinkBounds(root)))
    assert (set(PATHS) - left_out) | {"environment/Dockerfile", "tests/test.sh"} <= listed
    assert not listed & (left_out | ignores.keys())


@pytest.mark.parametrize("folder", ["solution", "steps/one/tests", "steps/two/solution/sub"])
def test_ignore_rules_apply_to_every_upload(make_task: MakeTask, folder: str) -> None:
    root = make_task(files={f"{folder}/.harborignore": "x", f"{folder}/x": "", f"{folder}/y": ""})
    chosen = UploadFilter(root)
    assert (chosen.excludes(root / folder / "x"), chosen.excludes(root / folder / "y")) == (True, False)


def test_harborignore_in_a_step_workdir_is_ignored(make_task: MakeTask) -> None:
    root = make_task(files={"steps/one/workdir/.harborignore": "x", "steps/one/workdir/x": ""})
    assert not UploadFilter(root).excludes(root / "steps/one/workdir/x")


def test_link_to_an_excluded_file_is_excluded(make_task: MakeTask) -> None:
    root = make_task(files={"solution/.harborignore": "secret", "solution/secret": "", "solution/known": ""})
    (root / "tests" / "to-secret").symlink_to("../solution/secret")
    (root / "tests" / "to-known").symlink_to("../solution/known")
    chosen = UploadFilter(root)
    assert [chosen.excludes(root / "tests" / name) for name in ("to-secret", "to-known")] == [True, False]


async def test_uploads_are_copied_only_with_exclusions(make_task: MakeTask) -> None:
    root = make_task(files={"tests/sub/x.log": "", "tests/sub/y": "y", "tests/gone/z.log": "", "solution/a": ""})
    (root / "tests" / "sub" / "link").symlink_to("y")
    (root / "tests" / "test.sh").chmod(0o750)
    (root / "tests" / ".harborignore").write_text("*.log\ngone/\n")
    async with uploadable(root, root / "solution") as folder:
        assert folder == root / "solution"
    async with uploadable(root, root / "tests") as folder:
        assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == [
            *("sub", "sub/link", "sub/y", "test.sh")
        ]
        assert (folder / "sub" / "link").readlink() == Path("y")
        assert (folder / "test.sh").stat().st_mode & 0o777 == 0o750
    assert not folder.exists()


async def test_failed_copy_is_removed(make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    root = make_task(files={"tests/.harborignore": "x"})
    os.mkfifo(root / "tests" / "pipe")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(TransferError, match=r"tests/pipe for an upload: expected a file"):
        async with uploadable(root, root / "tests"):
            pytest.fail("there is nothing to upload")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_script_of_a_step_cannot_be_excluded(make_task: MakeTask) -> None:
    files = {"steps/a/tests/.harborignore": "*.sh", "steps/a/instruction.md": "", "steps/a/tests/test.sh": ""}
    with pytest.raises(
        TaskError, match=r"steps/a/tests/test\.sh: this script is needed in the container, but a \.harbor"
    ):
        load_task(make_task(toml="[[steps]]\nname = 'a'", files=files))


def test_unreadable_ignore_file_is_refused(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task(files={"tests/.harborignore/x": ""})
    with pytest.raises(TaskError, match=r"tests/\.harborignore: a line is not a valid \.gitignore pattern"):
        load_task(root)
    other = make_task("other")
    (tmp_path / "rules").write_text("*")
    (other / "tests" / ".harborignore").symlink_to(tmp_path / "rules")
    with pytest.raises(TaskError, match=r"tests/\.harborignore: expected a link to a place inside"):
        load_task(other)


def expected_digest(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for path in sorted(contents):
        total.update(path.encode() + b"\0" + hashlib.sha256(contents[path]).hexdigest().encode() + b"\n")
    return f"sha256:{total.hexdigest()}"


def test_digest_is_over_relative_paths_and_contents(make_task: MakeTask) -> None:
    ignored = (
        *("tests/__pycache__/a.pyc", "tests/b.pyc", "solution/.solve.sh.swp", "solution/x~", "tests/.DS_Store"),
        "notes",
    )
    root = make_task(files={"README.md": "r", **dict.fromkeys(ignored, "")})
    relevant = (
        *("task.toml", "instruction.md", "README.md", "environment/Dockerfile", "tests/test.sh"),
        "solution/solve.sh",
    )
    assert load_task(root).digest == expected_digest({name: (root / name).read_bytes() for name in relevant})
    (root / "tests" / "test.sh").chmod(0o700)
    (root / "tests" / "empty").mkdir()
    assert load_task(root).digest == expected_digest({name: (root / name).read_bytes() for name in relevant})


def test_digest_follows_the_tasks_gitignore(make_task: MakeTask) -> None:
    root = make_task(
        files={".gitignore": "*.log\n!keep.log\n", "tests/a.log": "", "tests/keep.log": "", "tests/b.pyc": ""}
    )
    counted = ("task.toml", "instruction.md", "environment/Dockerfile", "solution/solve.sh")
    tests = ("tests/test.sh", "tests/keep.log", "tests/b.pyc")
    assert load_task(root).digest == expected_digest({name: (root / name).read_bytes() for name in counted + tests})


@pytest.mark.parametrize("recorded", [None, "sha256:a", "sha256:a {", "sha256:a []", 'sha256:a {"/c": 1}', 5])
def test_old_or_broken_records_report_no_changes(recorded: str | None) -> None:
    assert changed_files(recorded, with_files("sha256:a", {"/b": "x"})) == []
    assert content_of(None) is None


READ_FILES = [
    *("instruction.md", "task.toml", "trajectory.json", "README.md", ".gitignore", "environment"),
    *("environment/Dockerfile", "environment/docker-compose.yaml", "environment/.dockerignore", "environment/.env"),
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


@pytest.mark.parametrize(
    ("name", "make_link"),
    [
        *((name, absolute_link) for name in READ_FILES),
        *(("instruction.md", kind) for kind in (relative_link, link_to_a_link, link_through_a_directory)),
    ],
)
def test_links_out_of_a_task_are_rejected(
    make_task: MakeTask, outside: Path, name: str, make_link: Callable[[Path, Path], None]
) -> None:
    other, root = make_task("other"), make_task(files=COMPOSED)
    target = outside / ("environment" if name == "environment" else "secret")
    make_link(replace(root / name), target)
    with pytest.raises(TaskError, match=f"expected a link to a place inside the task, found a link to {outside}"):
        load_task(root)
    tasks, skipped = load_task_set(root.parent)
    assert [task.path for task in tasks] == [other]
    [reason] = skipped.values()
    assert f"inside the task or inside {root.parent}, found a link to {outside}" in reason
    assert str(root / name) in reason or name == "environment/.env"  # or the other link next to it


@pytest.mark.parametrize("name", ["instruction.md", "environment", "environment/Dockerfile"])
@pytest.mark.parametrize("named", ["real", "link", "behind a link"])
def test_tasks_may_share_files_inside_the_named_directory(
    make_task: MakeTask, tmp_path: Path, name: str, named: str
) -> None:
    root, shared = make_task(), tmp_path / "tasks" / "shared"
    shared.mkdir()
    (root / name).rename(shared / Path(name).name)
    relative_link(root / name, shared / Path(name).name)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "linked-tasks").symlink_to("tasks")
    path = {"real": "tasks", "link": "linked-tasks", "behind a link": "link/tasks"}[named]
    [task] = load_task_set(tmp_path / path)[0]
    assert task.stages[0].instruction == "Do it.\n"
    assert task.container_spec.context_dir is not None
    assert (task.container_spec.context_dir / "Dockerfile").read_text().startswith("FROM debian")
    assert task.digest == load_task(root, links_within=root.parent).digest
    with pytest.raises(TaskError, match=f"{name}: expected a link to a place inside the task, found"):
        load_task(root)
    with pytest.raises(TaskError, match=f"{name}: expected a link to a place inside the task, found"):
        load_task_set(root)


def test_registry_tasks_may_share_files_below_path(make_task: MakeTask, tmp_path: Path) -> None:
    root, registry = make_task(), tmp_path / "registry.json"
    (root / "instruction.md").rename(root.parent / "shared.md")
    (root / "instruction.md").symlink_to("../shared.md")
    row = {"name": "d", "version": "1", "description": "", "tasks": [{"name": "a-task", "path": str(root)}]}
    registry.write_text(json.dumps([row]))
    with pytest.raises(TaskError, match=r"instruction\.md: expected a link to a place inside the task, found"):
        HarborEnvironments(registry=registry, dataset="d").load(print)
    assert HarborEnvironments(registry=registry, dataset="d", path=root.parent).load(print) == ["a-task"]


def test_linked_task_directory_is_loaded(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task()
    (root / "instruction.md").rename(root / "text.md")
    (root / "instruction.md").symlink_to("text.md")
    (tmp_path / "link").symlink_to(root)
    assert load_task_set(tmp_path / "link")[0][0].stages[0].instruction == "Do it.\n"


def test_digest_excludes_files_outside_the_task(make_task: MakeTask, outside: Path) -> None:
    root = make_task()
    (root / "environment" / "data").symlink_to(outside / "secret")
    before = load_task(root).digest
    (outside / "secret").write_text("changed")
    assert load_task(root).digest == before
    assert "environment/data" not in digested_files(LinkBounds(root))  # the files that the tracker uploads


@pytest.mark.parametrize("swapped", ["instruction.md", "texts"])
def test_link_swapped_after_the_check_is_refused(
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
    with pytest.raises(TaskError, match=r"not a regular file|Too many levels of symbolic links: 'instruction\.md'"):
        load_task(root)
