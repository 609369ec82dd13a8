"""Provenance: git states of real repositories, versions, the masked command line."""

import json
import platform
import sys
import time
import tomllib
from pathlib import Path

import pytest

from ares_exp.runs.resume.session import collect_provenance
from tests.compatibility.sources import git

ROOT = Path(__file__).parents[3]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "tasks" / "one").mkdir(parents=True)
    (root / "tasks" / "one" / "task.toml").write_text("version = '1.0'\n")
    (root / ".gitignore").write_text("venv/\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def _state(path: Path) -> object:
    return collect_provenance(task_set_path=path)["task_set"]


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [(".gitignore", False), ("notes.txt", False), ("tasks/one/task.toml", True), ("tasks/one/new.txt", True)],
)
def test_only_changed_tasks_are_dirty(repository: Path, changed: str, dirty: bool) -> None:
    clean = {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False}
    assert _state(repository / "tasks") == _state(repository / "tasks" / "one" / "task.toml") == clean
    (repository / changed).write_text("changed")
    assert _state(repository / "tasks") == {**clean, "dirty": dirty}


def test_ignored_folder_has_no_commit(repository: Path) -> None:
    inner = repository / "venv" / "tasks"
    inner.mkdir(parents=True)
    (inner / "task.toml").touch()
    assert _state(inner) is None


def test_git_is_not_misled_by_the_environment(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    commit = _state(repository / "tasks")
    assert isinstance(commit, dict)
    assert commit["dirty"] is False


def test_git_index_is_unchanged(repository: Path) -> None:
    (repository / "tasks" / "one" / "task.toml").touch()
    before = (repository / ".git" / "index").read_bytes()
    assert _state(repository / "tasks") is not None
    assert (repository / ".git" / "index").read_bytes() == before


def test_missing_repository_and_commit_give_no_state(tmp_path: Path) -> None:
    assert _state(tmp_path) is None
    assert _state(tmp_path / "missing" / "folder") is None
    git(tmp_path, "init", "-q", "empty")
    assert _state(tmp_path / "empty") is None


def test_missing_git_is_tolerated(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _state(repository / "tasks") is None


def test_hanging_git_times_out(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent))
    monkeypatch.setattr("ares_exp.runs.resume.session._GIT_TIMEOUT_SEC", 0.2)
    started = time.monotonic()
    assert _state(repository / "tasks") is None
    assert time.monotonic() - started < 30.0


def test_versions_machine_and_command_line_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ares_exp", "seed=3", "policy.api_key=hunter2"])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    found = collect_provenance()
    assert found["ares_exp_version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert found["python"] == platform.python_version()
    assert found["packages"]["pydantic"].startswith("2.")
    assert found["argv"] == ["ares_exp", "seed=3", "policy.api_key=***"]
    assert found["python_hash_seed"] == "7"
    assert found["task_set"] is None
    assert found["hostname"]
    assert json.loads(json.dumps(found)) == found
