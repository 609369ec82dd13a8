"""Tasks of a registry and of a git repository, from the command line."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from ares_exp.tasks.task_set import SAMPLES
from ares_exp.tasks.task_sources.task_lists import HARBOR_REPOSITORY
from tests.closed_port import closed_port
from tests.compatibility.sources import git, mirror
from tests.conftest import SECRET_FREE, Cli, rows
from tests.warm_start import WarmProcess, warm_command

TASK = "write-greeting"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a sample task, and a registry next to it that names the task."""
    root = tmp_path / "repository"
    shutil.copytree(SAMPLES / TASK, root / "tasks" / TASK)
    shutil.copytree(SAMPLES / "count-records", root / "tasks" / "count-records")
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=tasks")
    task = {"name": "greeting", "git_url": f"file://{root}", "path": f"tasks/{TASK}"}
    row = {"name": "greetings", "version": "1.0", "description": "Greetings.", "tasks": [task]}
    (tmp_path / "registry.json").write_text(json.dumps([row, {**row, "version": "1.10"}]))
    return root


def _ran(run: Path) -> list[tuple[str, float]]:
    return [(row["task_name"], row["reward"]) for row in rows(run)]


@pytest.mark.local
@pytest.mark.once
def test_oracle_runs_a_registry_and_a_repository(cli: Cli, repository: Path, tmp_path: Path) -> None:
    commit, home = git(repository, "rev-parse", "HEAD"), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = cli(*("tracker=none", "env.registry=registry.json", "env.dataset=greetings", "hydra.run.dir=one"), env=home)
    assert done.returncode == 0, done.stderr
    assert _ran(tmp_path / "one") == [(TASK, 1.0)]
    provenance = json.loads((tmp_path / "one" / "provenance.json").read_text())
    place = {"git_url": f"file://{repository}", "git_commit": commit, "path": f"tasks/{TASK}"}
    assert provenance["task_origins"] == {TASK: place}

    repo = f"env.repo=file://{repository}@{commit}"
    done = cli("tracker=none", repo, f"env.tasks={TASK}", "env.path=tasks", "hydra.run.dir=two", env=home)
    assert done.returncode == 0, done.stderr
    assert _ran(tmp_path / "two") == [(TASK, 1.0)]
    assert len(list((tmp_path / "cache" / "ares_exp" / "tasks").glob("*/files/*/tasks/*/task.toml"))) == 1

    (tmp_path / "elsewhere").mkdir()
    command = [*warm_command(), "resume=../two", "attempts=2"]
    again = subprocess.run(
        command, cwd=tmp_path / "elsewhere", env={**SECRET_FREE, **home}, capture_output=True, text=True, timeout=90
    )
    assert again.returncode == 0, again.stderr
    assert _ran(tmp_path / "two") == [(TASK, 1.0)] * 2


@pytest.mark.once
def test_plain_dataset_is_from_the_harbor_registry(cli: Cli, repository: Path, tmp_path: Path) -> None:
    listed = (tmp_path / "registry.json").read_text()
    (repository / "registry.json").write_text(listed.replace("greetings", "terminal-bench"))
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=registry")
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    unknown = cli("env.dataset=terminal-bench@2.0", env={**home, **mirror(HARBOR_REPOSITORY, f"file://{repository}")})
    assert unknown.returncode == 2
    assert "has no version '2.0' of terminal-bench. Did you mean" in unknown.stderr

    with closed_port() as port:
        away = mirror(HARBOR_REPOSITORY, f"http://127.0.0.1:{port}/harbor.git")
        refused = cli("env=terminal_bench", "container=local", env={**home, **away})
    assert refused.returncode == 2
    assert f"Harbor's own registry was tried: registry.json of {HARBOR_REPOSITORY}" in refused.stderr
    assert "`git ls-remote` failed" in refused.stderr
    assert "Check the address." not in refused.stderr
    assert "`env.registry=<a copy of the file>`" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.once
def test_ctrl_c_ends_a_fetch(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        repo = f"env.repo=git://127.0.0.1:{server.getsockname()[1]}/tasks"
        command = ["tracker=none", repo, f"env.cache_dir={tmp_path}/cache"]
        with WarmProcess(command, cwd=tmp_path, env=SECRET_FREE) as process:
            connection, _ = server.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                _, told = process.communicate(timeout=60)
                connection.settimeout(30)
                while connection.recv(4096):  # what git asks for, then the end of git
                    pass
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert not (tmp_path / "cache").exists()
