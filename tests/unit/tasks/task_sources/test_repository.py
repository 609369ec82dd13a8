"""What a repository is asked, once something is known of it."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import PreflightError
from ares_exp.tasks.task_sources import repository as repository_module
from tests.unit.tasks.task_sources.conftest import MakeRepository, Repository


@pytest.fixture
def told() -> list[str]:
    """What `load` reported."""
    return []


@pytest.fixture
def repository(make_repository: MakeRepository) -> Repository:
    found = make_repository("tasks/a", "tasks/b")
    task = '{"name": "a", "path": "tasks/a"}'
    found.write({"registry.json": f'[{{"name": "set", "version": "1", "description": "", "tasks": [{task}]}}]'})
    found.commit()
    return found


def load(cache_dir: Path, told: list[str], **options: object) -> dict[str, str]:
    """The commit of each task."""
    source = HarborEnvironments(cache_dir=cache_dir, **options)  # type: ignore[arg-type]
    source.load(told.append)
    return {name: origin.git_commit for name, origin in source.origins.items()}


@pytest.mark.parametrize("options", [{}, {"dataset": "set"}, {"tasks": "a"}])
def test_of_a_commit_nothing_is_asked_twice(
    repository: Repository, cache_dir: Path, told: list[str], options: dict[str, str]
) -> None:
    commit = repository.git("rev-parse", "HEAD")
    first = load(cache_dir, told, repo=f"{repository.url}@{commit}", **options)
    shutil.rmtree(repository.path)
    assert load(cache_dir, told, repo=f"{repository.url}@{commit}", **options) == first
    assert told == []
    if "tasks" in options:
        with pytest.raises(PreflightError, match="cannot be copied"):
            load(cache_dir, told, repo=f"{repository.url}@{commit}")


@pytest.mark.parametrize(("ref", "what"), [("", "its default branch"), ("@main", "its 'main'"), ("@v1", "its 'v1'")])
def test_without_an_answer_the_last_one_is_taken_and_that_is_told(
    repository: Repository, cache_dir: Path, told: list[str], ref: str, what: str
) -> None:
    repository.git("tag", "--annotate", "--message=v1", "v1")
    first = load(cache_dir, told, repo=repository.url + ref)
    assert told == []
    shutil.rmtree(repository.path)
    assert load(cache_dir, told, repo=repository.url + ref) == first
    [warning] = told
    assert warning.startswith(f"{repository.url} gave no answer, so {what} is taken to be commit {first['a']}, as on ")
    assert "does not appear to be a git repository" in warning
    with pytest.raises(PreflightError, match="cannot be copied"):
        load(cache_dir, told, repo=f"{repository.url}@other")


@pytest.mark.parametrize("ref", ["", "@main", "@v1"])
def test_what_has_moved_is_fetched(repository: Repository, cache_dir: Path, told: list[str], ref: str) -> None:
    repository.git("tag", "v1")
    repository.git("branch", "later/main")  # whose name ends as that of another
    first = load(cache_dir, told, repo=repository.url + ref)
    repository.add_task("tasks/c")
    second = repository.commit()
    repository.git("tag", "--force", "--annotate", "--message=v1", "v1")
    found = load(cache_dir, told, repo=repository.url + ref)
    assert found == dict.fromkeys(("a", "b", "c"), second) != first
    assert told == []


def test_a_branch_that_is_gone_is_told(repository: Repository, cache_dir: Path, told: list[str]) -> None:
    repository.git("branch", "side")
    load(cache_dir, told, repo=f"{repository.url}@side")
    repository.git("branch", "-D", "side")
    with pytest.raises(PreflightError, match="has no 'side' that can be fetched"):
        load(cache_dir, told, repo=f"{repository.url}@side")


def test_what_stands_still_is_asked_one_question(
    repository: Repository, cache_dir: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(cache_dir, told, repo=repository.url)
    trace = cache_dir / "trace"
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
    monkeypatch.setattr("ares_exp.tasks.task_sources.git_command._PASSED_ON", ("GIT_TRACE2",))
    assert load(cache_dir, told, repo=repository.url) == first
    assert _commands(trace) == ["ls-remote"]


def _commands(trace: Path) -> list[str]:
    events = map(json.loads, trace.read_text().splitlines())
    return [event["name"] for event in events if event["event"] == "cmd_name" and event["hierarchy"] == event["name"]]


@pytest.fixture
def deaf_address(silent_server: socket.socket) -> str:
    return f"git://127.0.0.1:{silent_server.getsockname()[1]}/tasks"


def test_a_server_that_says_nothing_is_not_waited_for_long(
    repository: Repository, cache_dir: Path, told: list[str], deaf_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_module, "QUESTION_SEC", 0.3)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(cache_dir.parent / "gitconfig"))
    moved = cache_dir.parent / "gitconfig"
    moved.write_text(f'[url "{repository.url}"]\n\tinsteadOf = {deaf_address}\n')
    first = load(cache_dir, told, repo=deaf_address)
    moved.write_text("")
    assert load(cache_dir, told, repo=deaf_address) == first
    assert "`git ls-remote` was killed after 0.3 seconds" in told[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"commit": "x", "time": "now"}', "[" * 100_000])
def test_broken_notes_are_none(repository: Repository, cache_dir: Path, told: list[str], text: str) -> None:
    first = load(cache_dir, told, repo=repository.url)
    notes = list(cache_dir.glob("*.json"))
    assert len(notes) == 2
    for note in notes:
        note.write_text(text)
    assert load(cache_dir, told, repo=repository.url) == first
    assert told == []
