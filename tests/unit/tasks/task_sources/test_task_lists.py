"""What lists of tasks may name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.tasks.task_sources.git_names import RepositoryReference
from ares_exp.tasks.task_sources.registry_file import DatasetName
from ares_exp.tasks.task_sources.task_lists import data_set_of_repository

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


def test_a_list_from_elsewhere_names_no_repository_of_this_machine() -> None:
    with pytest.raises(ConfigError, match="task 'a': expected an address, got 'file:///home/somebody/tasks'"):
        references(REMOTE)
    assert [task.url for task in references(LOCAL)] == ["file:///home/somebody/tasks"]
