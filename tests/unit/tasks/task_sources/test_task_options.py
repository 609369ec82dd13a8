"""What the options of env=harbor mean together. Nothing is read here: no file and no repository exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import ConfigError
from ares_exp.tasks.task_set import SAMPLES


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"repo": "o/n", "git_url": "host:x"}, r"two ways to name a repository.*`env.git_url`, `env.repo`"),
        ({"git_commit": "main"}, "`env.git_commit` belongs to `env.git_url`"),
        ({"repo": "o/n", "git_commit": "main"}, "`env.repo=<…>@<commit>`"),
        ({"git_url": "host:x", "registry": "r.json"}, "`env.git_url` is one task"),
        ({"git_url": "host:x", "dataset": "d"}, "`env.git_url` is one task"),
        ({"git_url": "ext::sh"}, "`env.git_url`: expected the address"),
        ({"git_url": "host:x", "git_commit": "--x"}, "`env.git_commit`: expected a commit"),
        ({"git_url": "host:x", "path": "../a"}, "`env.path`: expected a relative path that stays inside"),
        ({"git_url": "host:x", "path": "/a"}, "`env.path`: expected a relative path"),
        ({"repo": "./tasks"}, "`env.repo`: expected a repository"),
        ({"repo": "o/n", "path": ".."}, "`env.path`: expected a relative path"),
        (
            {"repo": "https://h/o/n/tree/main/a", "path": "b"},
            "Expected one folder of `env.repo`, got 'a' in it and 'b'",
        ),
        ({"repo": "o/n", "dataset": "d", "path": "b"}, "do not name a folder"),
        ({"repo": "o/n", "registry": "r.json"}, "choose one with `env.dataset"),
        ({"repo": "o/n", "dataset": "d", "registry": "../r.json"}, "`env.registry`: expected a relative path"),
        ({"registry": "r.json"}, "choose one with `env.dataset"),
        (
            {"registry": "https://h/o/r.json", "dataset": "d"},
            "`env.registry` to be a path, got the URL https://h/o/r.json: download it first",
        ),
        ({"path": "https://h/o/n"}, "`env.path` to be a path, got the URL https://h/o/n: .* `env.repo=<url>`"),
        ({"dataset": "d", "path": "tasks"}, "`env.path` is a folder of tasks"),
        ({"dataset": "org/name"}, "`env.dataset`: 'org/name' is a package"),
        ({"registry": "r.json", "dataset": "@1"}, "`env.dataset`: expected name or name@version"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], complaint: str) -> None:
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
def test_what_goes_together_has_no_one_folder(options: dict[str, Any]) -> None:
    source = HarborEnvironments(**options)
    assert source.path is None
    assert not source.loads_offline


def test_without_any_it_is_the_samples() -> None:
    assert HarborEnvironments().path == SAMPLES
    assert HarborEnvironments(path=Path("tasks")).path == Path("tasks")
    assert HarborEnvironments().loads_offline
