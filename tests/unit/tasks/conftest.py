"""Task directories made for one test."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerFactory
from ares_exp.tasks.harbor_task import HarborTask
from tests.compatibility.case import write_task

MakeTask = Callable[..., Path]


@asynccontextmanager
async def episode(task: HarborTask, factory: ContainerFactory) -> AsyncIterator[Container]:
    """The agent's container of a task, set up."""
    async with factory(task.container_spec) as container:
        await task.set_up(container)
        yield container


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """Writes a valid task; `files` adds to it, replaces, or (with `None`) removes."""

    def make(name: str = "a-task", toml: str = "", files: Mapping[str, str | None] | None = None) -> Path:
        solved = {"task.toml": toml, "solution/solve.sh": "#!/bin/bash\ntouch /app/done\n"}
        return write_task(tmp_path / "tasks" / name, {**solved, **(files or {})})

    return make
