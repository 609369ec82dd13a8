"""The paths of this machine that `container=host` uses, below a temporary directory."""

import json
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local.container import read_task_dockerfile
from ares_exp.containers.local.guardian import MADE, remove_made
from ares_exp.containers.local.host_factory import MachinePaths, check_paths
from ares_exp.errors import ContainerStartError, UnsupportedTaskError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (directory := tmp_path / "container").mkdir()
    return directory


def recorded(directory: Path) -> list[tuple[str, bool, bool]]:
    """Path, whether it is kept, and whether its identity is known; the last record of each path counts."""
    lines = [json.loads(line) for line in (directory / MADE).read_text().splitlines()]
    last = {line["path"]: line for line in lines}
    return [(Path(line["path"]).name, line["is_kept"], line["id"] is not None) for line in last.values()]


def test_claim_records_the_topmost_missing_directory(directory: Path, tmp_path: Path) -> None:
    paths = MachinePaths(directory)
    paths.claim(str(tmp_path / "app/sub"))
    paths.claim(str(tmp_path / "app"))
    assert recorded(directory) == [("app", False, False)]
    assert not (tmp_path / "app").exists()
    (tmp_path / "app").mkdir()
    paths.settle()
    assert recorded(directory) == [("app", False, True)]
    assert remove_made(directory, is_certain=False) == []
    assert not (tmp_path / "app").exists()


def test_settle_creates_the_missing_directories(directory: Path, tmp_path: Path) -> None:
    paths = MachinePaths(directory)
    paths.claim(str(tmp_path / "logs"))
    paths.claim(str(tmp_path / "new/tests"))
    paths.settle()
    assert recorded(directory) == [("logs", False, True), ("new", False, True)]
    (tmp_path / "logs/file").touch()
    assert remove_made(directory, is_certain=False) == []
    assert sorted(tmp_path.iterdir()) == [directory]


def test_claim_of_an_empty_directory_keeps_it(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    MachinePaths(directory).claim(str(tmp_path / "app"))
    assert recorded(directory) == [("app", True, True)]


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_claim_refuses_an_occupied_path(directory: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "app"
    if kind == "full":
        path.mkdir()
        (path / "mine").touch()
    elif kind == "file":
        path.touch()
    else:
        path.symlink_to(directory)
    with pytest.raises(ContainerStartError, match="app exists and is not an empty directory"):
        MachinePaths(directory).claim(str(path))
    assert recorded(directory) == []


def test_upload_makes_only_recorded_paths(directory: Path, tmp_path: Path) -> None:
    source, existing = tmp_path / "source", tmp_path / "existing"
    (source / "sub").mkdir(parents=True)
    (source / "file").touch()
    (source / "taken").touch()
    existing.mkdir()
    (existing / "taken").write_text("mine")
    paths = MachinePaths(directory)
    paths.make_room(source, str(existing))
    paths.make_room(source / "file", str(tmp_path / "new/parents/file"))
    paths.make_room(source / "file", str(tmp_path / "new/other"))
    assert sorted(recorded(directory)) == [("file", False, True), ("new", False, True), ("sub", False, True)]
    assert remove_made(directory, is_certain=False) == []
    assert [path.name for path in existing.iterdir()] == ["taken"]
    assert not (tmp_path / "new").exists()


def test_upload_records_new_paths_at_any_depth(directory: Path, tmp_path: Path) -> None:
    source, existing = tmp_path / "source", tmp_path / "existing"
    (source / "etc/new/sub").mkdir(parents=True)
    (source / "etc/new/sub/file").touch()
    (source / "etc/file").touch()
    (source / "etc/link").symlink_to(directory)
    (existing / "etc").mkdir(parents=True)
    (existing / "etc/mine").touch()
    MachinePaths(directory).make_room(source, str(existing))
    assert recorded(directory) == [("file", False, True), ("link", False, True), ("new", False, True)]
    assert not (existing / "etc/link").is_dir()
    assert remove_made(directory, is_certain=False) == []
    assert [path.name for path in (existing / "etc").iterdir()] == ["mine"]


def spec_of(tmp_path: Path, dockerfile: str, *directories: str) -> ContainerSpec:
    (context := tmp_path / "environment").mkdir()
    (context / "Dockerfile").write_text(f"FROM any\n{dockerfile}\n")
    (context / "data").touch()
    (context / "root/sub/deep").mkdir(parents=True)
    (context / "root/sub/deep/hosts").touch()
    (context / "root/lib").mkdir()
    (context / "root/sub/link").symlink_to("deep")
    return ContainerSpec("task", context_dir=context, directories=directories)


@pytest.mark.parametrize(
    ("dockerfile", "problem"),
    [
        ("WORKDIR {}/full", "full exists and is not an empty directory"),
        ("COPY data {}/full/data", "full/data exists"),
        ("COPY data {}/full/", "full/data exists"),
        ("COPY data {}/full", "full/data exists"),
        ("COPY . {}/full", "full/data exists"),
        ("COPY root/ {}/full", "full/sub/deep/hosts exists"),
        ("COPY root/ {}/full", "full/sub/link exists"),
        ("COPY root/ {}/full", "full/lib exists"),
        ("COPY data {}/tests/data", "its Dockerfile copies files to .*/tests"),
    ],
)
def test_check_names_the_occupied_paths(tmp_path: Path, dockerfile: str, problem: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/data").touch()
    (tmp_path / "full/sub/deep").mkdir(parents=True)
    (tmp_path / "full/sub/deep/hosts").touch()
    (tmp_path / "full/sub/link").mkdir()
    (tmp_path / "full/lib").symlink_to("sub")  # an upload would replace it with a directory
    spec = spec_of(tmp_path, dockerfile.format(tmp_path), f"{tmp_path}/tests")
    with pytest.raises(UnsupportedTaskError, match=f"container=host uses the paths of this machine, but .*{problem}"):
        check_paths(spec, read_task_dockerfile(spec, backend="host"))


def test_check_accepts_missing_and_empty_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nested/sub/deep").mkdir(parents=True)
    files = f"WORKDIR /\nWORKDIR {tmp_path}/app\nCOPY data {tmp_path}/app/\nCOPY data {tmp_path}/empty/new"
    files += f"\nCOPY root/ {tmp_path}/nested"
    spec = spec_of(tmp_path, files, f"{tmp_path}/tests", f"{tmp_path}/empty")
    with pytest.raises(UnsupportedTaskError, match=r"its Dockerfile copies files to .*/empty"):
        check_paths(spec, read_task_dockerfile(spec, backend="host"))
    bare = ContainerSpec("task", context_dir=spec.context_dir, directories=(f"{tmp_path}/tests",))
    check_paths(bare, read_task_dockerfile(bare, backend="host"))
