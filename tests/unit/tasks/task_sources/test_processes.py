"""Several processes that fetch the same tasks, and one that is killed while it does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from tests.unit.tasks.task_sources.conftest import MakeRepository

LOAD = """
import json, sys
from ares_exp.environments.harbor import HarborEnvironments

source = HarborEnvironments(**json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
source.load(print)
print(json.dumps([[str(task.path), task.digest] for task in source.tasks]))
"""


def loading(**options: str) -> subprocess.Popen[str]:
    """A process that loads a task set once it is told to."""
    command = [sys.executable, "-c", LOAD, json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_at_once_share_what_they_fetch(make_repository: MakeRepository, cache_dir: Path) -> None:
    repository = make_repository("tasks/a", "tasks/b", "tasks/c")
    with ExitStack() as stack:
        options = {"repo": repository.url, "cache_dir": str(cache_dir)}
        both = [stack.enter_context(loading(**options)) for _ in range(2)]
        for process in both:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        first, second = (process.communicate(timeout=60)[0] for process in both)
    assert first == second
    assert [Path(path).name for path, _ in json.loads(first)] == ["a", "b", "c"]
    assert sorted(path.name for path in cache_dir.glob("*/*") if path.parent.name != "commits") == ["a", "b", "c"]
    assert len([*cache_dir.glob("commits/*")]) == 1


@pytest.mark.once
def test_git_dies_with_the_process_that_runs_it(
    silent_server: socket.socket, make_repository: MakeRepository, cache_dir: Path
) -> None:
    url = f"git://127.0.0.1:{silent_server.getsockname()[1]}/tasks"
    with loading(repo=url, cache_dir=str(cache_dir)) as process:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        connection, _ = silent_server.accept()
        with connection:
            process.kill()
            connection.settimeout(30)
            while connection.recv(4096):  # what git asks for, then the end of git
                pass
    assert not cache_dir.exists(), "it has asked, and fetched nothing yet"
    repository = make_repository("tasks/a")
    source = HarborEnvironments(repo=repository.url, cache_dir=cache_dir)
    source.load(print)
    assert [path.name for path in cache_dir.glob("*/*") if path.parent.name != "commits"] == ["a"]
