"""Real git repositories of tasks, and a server that never answers."""

import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.compatibility.case import write_task
from tests.compatibility.sources import git

MakeRepository = Callable[..., "Repository"]


class Repository:
    """A repository with a working tree."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "uploadpack.allowFilter", "true")

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def git(self, *arguments: str) -> str:
        return git(self.path, *arguments)

    def write(self, files: Mapping[str, str]) -> None:
        for relative, text in files.items():
            (self.path / relative).parent.mkdir(parents=True, exist_ok=True)
            (self.path / relative).write_text(text, encoding="utf-8")

    def add_task(self, folder: str, files: Mapping[str, str] | None = None) -> None:
        write_task(self.path / folder, {"solution/solve.sh": "#!/bin/bash\ntouch /app/done\n", **(files or {})})

    def link(self, relative: str, target: str) -> None:
        (self.path / relative).parent.mkdir(parents=True, exist_ok=True)
        (self.path / relative).symlink_to(target)

    def commit(self) -> str:
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--allow-empty", "--message=a commit")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def make_repository(tmp_path: Path) -> MakeRepository:
    def make(*tasks: str, name: str = "repository") -> Repository:
        repository = Repository(tmp_path / name)
        for task in tasks:
            repository.add_task(task)
        repository.commit()
        return repository

    return make


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """Accepts connections, of whoever calls `accept`, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server
