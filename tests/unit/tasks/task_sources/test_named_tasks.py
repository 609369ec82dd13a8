"""Registries, lists of tasks, and the options of `env=harbor`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import ConfigError
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.tasks.task_sources.git_tasks import RepositoryReference
from ares_exp.tasks.task_sources.task_lists import DatasetName, choose, data_set_of_repository, parse_registry

ROW: dict[str, Any] = {"name": "bench", "version": "1.0", "description": "", "tasks": [{"name": "t", "path": "t"}]}


def parsed(*rows: object) -> Any:
    return parse_registry(json.dumps(rows).encode(), where="registry.json")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{**ROW, "version": 1.0}], r"\[0\]\.version: .*string"),
        ([ROW, {**ROW, "tasks": [{"name": "t"}]}], r"\[1\]\.tasks\[0\]\.path: this key is required"),
        (
            [{**ROW, "tasks": [{"name": "t", "path": "t", "git_url": "ext::sh"}]}],
            r"tasks\[0\]\.git_url: expected the addr",
        ),
        ([{**ROW, "tasks": [{"name": "t", "path": "t", "git_commit_id": "-x"}]}], "git_commit_id: expected a commit"),
        (["bench"], r"\[0\]: .*got 'bench' \(str\)"),
    ],
)
def test_invalid_entries_are_reported_with_their_position(rows: list[object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parsed(*rows)


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("bnech", r"r has no data set 'bnech'\. Did you mean `bench`\? Available data sets: 'bench', 'other'\."),
        ("bench@1.2", r"r has no version '1\.2' of bench\. Did you mean .* Available versions: '1\.0', '1\.1'\."),
    ],
)
def test_unknown_data_set_lists_the_available_ones(wanted: str, complaint: str) -> None:
    datasets = parsed(ROW, {**ROW, "version": "1.1"}, {**ROW, "name": "other"})
    with pytest.raises(ConfigError, match=complaint):
        choose(datasets, DatasetName.parse(wanted), where="r")


def test_empty_registry_is_reported() -> None:
    with pytest.raises(ConfigError, match="Available data sets: none"):
        choose([], DatasetName.parse("bench"), where="r")


@pytest.mark.parametrize(
    ("text", "complaint"), [("org/name", "is a package"), ("", "name@version"), ("a@", "name@version")]
)
def test_invalid_data_set_names_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DatasetName.parse(text)


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"registry\.json: invalid JSON"):
        parse_registry(b"[" * 99_999, where="registry.json")


REMOTE, LOCAL = "https://host/org/name.git", "file:///srv/lists.git"


class OneCopy:
    """A repository with nothing but a registry, which names one of this machine."""

    def commit(self, url: str, ref: str | None) -> str:
        return "1" * 40

    def tree(self, url: str, commit: str) -> dict[str, str]:
        return {"registry.json": "100644"}

    def read(self, url: str, commit: str, path: str) -> bytes:
        task = {"name": "a", "path": "a", "git_url": "file:///home/somebody/tasks"}
        return json.dumps([{"name": "d", "version": "1", "description": "", "tasks": [task]}]).encode()


def references(url: str) -> Any:
    where = (RepositoryReference(url), DatasetName("d"), "registry.json")
    return data_set_of_repository(*where, OneCopy())  # type: ignore[arg-type]


def test_remote_list_cannot_name_local_repositories() -> None:
    with pytest.raises(ConfigError, match="task a: expected a remote URL, got file:///home/somebody/tasks"):
        references(REMOTE)
    assert [task.url for task in references(LOCAL)] == ["file:///home/somebody/tasks"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"repo": "o/n", "git_url": "host:x"}, r"two ways to name a repository.*`env.git_url`, `env.repo`"),
        ({"git_commit": "main"}, "`env.git_commit` needs `env.git_url`"),
        ({"repo": "o/n", "git_commit": "main"}, "`env.repo=<…>@<commit>`"),
        ({"git_url": "host:x", "registry": "r.json"}, "`env.git_url` selects one task"),
        ({"git_url": "host:x", "dataset": "d"}, "`env.git_url` selects one task"),
        ({"git_url": "ext::sh"}, "`env.git_url`: expected the address"),
        ({"git_url": "host:x", "git_commit": "--x"}, "`env.git_commit`: expected a commit"),
        ({"git_url": "host:x", "path": "../a"}, "`env.path`: expected a relative path that stays inside"),
        ({"git_url": "host:x", "path": "/a"}, "`env.path`: expected a relative path"),
        ({"repo": "./tasks"}, "`env.repo`: expected a repository"),
        ({"repo": "o/n", "path": ".."}, "`env.path`: expected a relative path"),
        (
            {"repo": "https://h/o/n/tree/main/a", "path": "b"},
            "Expected one folder, got 'a' in `env.repo` and 'b'",
        ),
        ({"repo": "o/n", "dataset": "d", "path": "b"}, "Do not set a folder"),
        ({"repo": "o/n", "registry": "r.json"}, "Choose one with `env.dataset"),
        ({"repo": "o/n", "dataset": "d", "registry": "../r.json"}, "`env.registry`: expected a relative path"),
        ({"registry": "r.json"}, "Choose one with `env.dataset"),
        (
            {"registry": "https://h/o/r.json", "dataset": "d"},
            "`env.registry` to be a path, got the URL https://h/o/r.json: download the file first",
        ),
        ({"path": "https://h/o/n"}, "`env.path` to be a path, got the URL https://h/o/n: .* `env.repo=<url>`"),
        ({"dataset": "d", "path": "tasks"}, "`env.path` is a folder of tasks"),
        ({"dataset": "org/name"}, "`env.dataset`: 'org/name' is a package"),
        ({"registry": "r.json", "dataset": "@1"}, "`env.dataset`: expected name or name@version"),
    ],
)
def test_conflicting_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        HarborEnvironments(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"registry": "r.json", "dataset": "d@1"},
        {"dataset": "d@1"},
        {"git_url": "host:x", "path": "tasks/a", "git_commit": "main"},
        {"repo": "o/n@main", "path": "."},
        {"repo": "o/n", "dataset": "d", "registry": "data/r.json"},
    ],
)
def test_compatible_options_have_no_single_directory(options: dict[str, Any]) -> None:
    source = HarborEnvironments(**options)
    assert source.path is None
    assert not source.loads_offline


def test_samples_are_the_default() -> None:
    assert HarborEnvironments().path == SAMPLES
    assert HarborEnvironments(path=Path("tasks")).path == Path("tasks")
    assert HarborEnvironments().loads_offline
