"""Repositories whose commits are in the cache: what needs no network, and what is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import PreflightError
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
        with pytest.raises(PreflightError, match="cannot be fetched"):
            load(cache_dir, told, repo=f"{repository.url}@{commit}")


def test_without_a_response_a_branch_is_refused_and_its_commit_is_run(
    repository: Repository, cache_dir: Path, told: list[str]
) -> None:
    first = load(cache_dir, told, repo=repository.url)
    shutil.rmtree(repository.path)
    for ref in ("", "@main"):
        with pytest.raises(PreflightError, match=r"cannot be copied: .*named by all its digits, needs no network"):
            load(cache_dir, told, repo=repository.url + ref)
    assert load(cache_dir, told, repo=f"{repository.url}@{first['a']}") == first


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
    with pytest.raises(PreflightError, match="has no 'side'"):
        load(cache_dir, told, repo=f"{repository.url}@side")


def test_what_stands_still_is_asked_one_question(
    repository: Repository, cache_dir: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(cache_dir, told, repo=repository.url)
    trace = cache_dir / "trace"
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
    monkeypatch.setattr("ares_exp.tasks.task_sources.git_command._PASSED_ON", ("GIT_TRACE2",))
    assert load(cache_dir, told, repo=repository.url) == first
    assert _commands(trace) == ["ls-remote", "ls-tree"], "of which one needs a network"


def _commands(trace: Path) -> list[str]:
    events = map(json.loads, trace.read_text().splitlines())
    return [event["name"] for event in events if event["event"] == "cmd_name" and event["hierarchy"] == event["name"]]


def test_the_copy_of_a_commit_stays_as_it_was_made(repository: Repository, cache_dir: Path, told: list[str]) -> None:
    load(cache_dir, told, repo=repository.url, tasks="a")
    (copy,) = (cache_dir / "commits").iterdir()
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    load(cache_dir, told, repo=repository.url)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    objects = ("cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
    listed = subprocess.run(["git", "--git-dir", str(copy), *objects], capture_output=True, text=True, check=True)
    assert sorted({*listed.stdout.split()}) == ["commit", "tree"]
