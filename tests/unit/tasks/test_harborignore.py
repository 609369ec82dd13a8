"""Digests of a task's content, and files that `.harborignore` leaves out."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ares_exp.errors import TaskError, TransferError
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_files import UploadFilter, changed_files, content_of, digested_files, uploadable, with_files
from ares_exp.tasks.verification.link_bounds import LinkBounds

MakeTask = Callable[..., Path]
Files = Mapping[str, str]

# What; the ignore files; what of these is left out.
PATHS = ("tests/a.log", "tests/keep.log", "tests/data/b.log", "tests/data/c.txt", "tests/data/deep/d.txt")
RULES: list[tuple[str, Files, set[str]]] = [
    ("none", {}, set()),
    ("a glob, at every depth", {"tests/.harborignore": "*.log"}, {"tests/a.log", "tests/keep.log", "tests/data/b.log"}),
    ("a comment and a blank line", {"tests/.harborignore": "# a.log\n\n"}, set()),
    ("negation", {"tests/.harborignore": "*.log\n!keep.log"}, {"tests/a.log", "tests/data/b.log"}),
    ("the last line wins", {"tests/.harborignore": "!keep.log\nkeep.log"}, {"tests/keep.log"}),
    ("anchored", {"tests/.harborignore": "/b.log\n/a.log"}, {"tests/a.log"}),
    ("a directory", {"tests/.harborignore": "data/"}, set(PATHS[2:])),
    ("what is in a directory that is out stays out", {"tests/.harborignore": "data/\n!data/b.log"}, set(PATHS[2:])),
    ("all but one in a directory", {"tests/.harborignore": "data/*\n!data/b.log"}, set(PATHS[3:])),
    ("the nearer file wins", {"tests/.harborignore": "*.log", "tests/data/.harborignore": "!b.log"},
     {"tests/a.log", "tests/keep.log"}),
    ("the nearer file adds", {"tests/data/.harborignore": "*.txt"}, {"tests/data/c.txt", "tests/data/deep/d.txt"}),
    ("rules of a directory hold below it only", {"tests/data/.harborignore": "*.log"}, {"tests/data/b.log"}),
    ("at the root of the task", {".harborignore": "*.log"}, set()),
    ("in the environment", {"environment/.harborignore": "*"}, set()),
    ("a directory's name for a file", {"tests/.harborignore": "a.log/"}, set()),
]  # fmt: skip


@pytest.mark.parametrize("case", RULES, ids=[case[0] for case in RULES])
def test_rules(make_task: MakeTask, case: tuple[str, Files, set[str]]) -> None:
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
def test_wherever_uploads_come_from(make_task: MakeTask, folder: str) -> None:
    root = make_task(files={f"{folder}/.harborignore": "x", f"{folder}/x": "", f"{folder}/y": ""})
    chosen = UploadFilter(root)
    assert (chosen.excludes(root / folder / "x"), chosen.excludes(root / folder / "y")) == (True, False)


def test_not_in_the_working_directory_of_a_step(make_task: MakeTask) -> None:
    root = make_task(files={"steps/one/workdir/.harborignore": "x", "steps/one/workdir/x": ""})
    assert not UploadFilter(root).excludes(root / "steps/one/workdir/x")


def test_a_link_to_what_is_left_out_is_left_out(make_task: MakeTask) -> None:
    root = make_task(files={"solution/.harborignore": "secret", "solution/secret": "", "solution/known": ""})
    (root / "tests" / "to-secret").symlink_to("../solution/secret")
    (root / "tests" / "to-known").symlink_to("../solution/known")
    chosen = UploadFilter(root)
    assert [chosen.excludes(root / "tests" / name) for name in ("to-secret", "to-known")] == [True, False]


async def test_uploads_are_a_copy_only_where_something_is_left_out(make_task: MakeTask) -> None:
    root = make_task(files={"tests/sub/x.log": "", "tests/sub/y": "y", "tests/gone/z.log": "", "solution/a": ""})
    (root / "tests" / "sub" / "link").symlink_to("y")
    (root / "tests" / "test.sh").chmod(0o750)
    (root / "tests" / ".harborignore").write_text("*.log\ngone/\n")
    async with uploadable(root, root / "solution") as folder:
        assert folder == root / "solution"
    async with uploadable(root, root / "tests") as folder:
        assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == [
            *("sub", "sub/link", "sub/y", "test.sh"),
        ]
        assert (folder / "sub" / "link").readlink() == Path("y")
        assert (folder / "test.sh").stat().st_mode & 0o777 == 0o750
    assert not folder.exists()


async def test_a_copy_that_cannot_be_made_is_not_left_behind(
    make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    root = make_task(files={"tests/.harborignore": "x"})
    os.mkfifo(root / "tests" / "pipe")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(TransferError, match=r"tests/pipe for an upload: expected a file"):
        async with uploadable(root, root / "tests"):
            pytest.fail("there is nothing to upload")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("folder", ["tests", "steps/a/tests"])
def test_the_test_script_cannot_be_left_out(make_task: MakeTask, folder: str) -> None:
    files = {f"{folder}/.harborignore": "*.sh", "steps/a/instruction.md": "", f"{folder}/test.sh": ""}
    root = make_task(toml="" if folder == "tests" else "[[steps]]\nname = 'a'", files=files)
    with pytest.raises(TaskError, match=rf"{folder}/test\.sh: expected this script to be uploaded, a \.harborignore"):
        load_task(root)


def test_the_solution_script_cannot_be_left_out_where_it_is_needed(make_task: MakeTask) -> None:
    task = load_task(make_task(files={"solution/.harborignore": "solve.sh"}))
    task.check_runnable()
    with pytest.raises(TaskError, match=r"solution/solve\.sh: expected this script to be uploaded"):
        task.check_runnable(needs_solution=True)


def test_links_that_are_left_out_may_lead_anywhere(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task()
    (root / "tests" / "outside").symlink_to(tmp_path)
    with pytest.raises(TaskError, match="tests/outside"):
        load_task(root)
    (root / "tests" / ".harborignore").write_text("outside\n")
    assert load_task(root).name == "a-task"


def test_an_ignore_file_that_cannot_be_read(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task(files={"tests/.harborignore/x": ""})
    with pytest.raises(TaskError, match=r"tests/\.harborignore: expected lines as in a \.gitignore"):
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
        "tests/__pycache__/a.pyc",
        "tests/b.pyc",
        "solution/.solve.sh.swp",
        "solution/x~",
        "tests/.DS_Store",
        "notes",
    )
    root = make_task(files={"README.md": "r", **dict.fromkeys(ignored, "")})
    relevant = (
        "task.toml",
        "instruction.md",
        "README.md",
        "environment/Dockerfile",
        "tests/test.sh",
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


def test_a_task_without_files_beside_it() -> None:
    assert with_files("sha256:a", {}) == "sha256:a" == content_of("sha256:a")
    assert content_of(None) is None


def test_changed_files_are_named_and_the_content_is_told_apart() -> None:
    before, now = (with_files("sha256:a", {"/a hint": text, "/b": "same"}) for text in ("one", "two"))
    assert before != now
    assert content_of(before) == content_of(now) == "sha256:a"
    assert changed_files(before, now) == ["/a hint"]
    assert changed_files(before, before) == []


@pytest.mark.parametrize("recorded", [None, "sha256:a", "sha256:a {", "sha256:a []", 'sha256:a {"/c": 1}', 5])
def test_what_an_older_or_broken_record_does_not_tell_has_not_changed(recorded: str | None) -> None:
    assert changed_files(recorded, with_files("sha256:a", {"/b": "x"})) == []
