"""What lists of tasks may name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.tasks.task_sources.registry_file import DatasetName
from ares_exp.tasks.task_sources.repository_reference import RepositoryReference
from ares_exp.tasks.task_sources.task_lists import RepositoryDataset

REMOTE, LOCAL = "https://host/org/name.git", "file:///srv/lists.git"


class OneCopy:
    """A repository with nothing but a registry, which names one of this machine."""

    def __init__(self, url: str) -> None:
        self.url = url

    def of(self, url: str) -> OneCopy:
        return self

    def commit(self, ref: str | None) -> str:
        return "1" * 40

    def tree(self, commit: str) -> dict[str, str]:
        return {"registry.json": "100644"}

    def read(self, commit: str, path: str) -> bytes:
        task = {"name": "a", "path": "a", "git_url": "file:///home/somebody/tasks"}
        return json.dumps([{"name": "d", "version": "1", "description": "", "tasks": [task]}]).encode()


def references(url: str) -> Any:
    return RepositoryDataset(RepositoryReference(url), DatasetName("d")).references(OneCopy(url))  # type: ignore[arg-type]


def test_a_list_from_elsewhere_names_no_repository_of_this_machine() -> None:
    with pytest.raises(ConfigError, match="task 'a': expected an address, got 'file:///home/somebody/tasks'"):
        references(REMOTE)
    assert [task.url for task in references(LOCAL)] == ["file:///home/somebody/tasks"]
