"""Repositories of tasks: git commands, the cache, and several processes that fetch."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ares_exp.containers import child_process
from ares_exp.containers.user_cache import changing, workspace
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import GitError, PreflightError
from ares_exp.tasks.task_sources.git_tasks import Git, default_cache_dir
from tests.unit.tasks.task_sources.conftest import MakeRepository, Repository


@pytest.fixture
def told() -> list[str]:
    """What `load` reported."""
    return []


@pytest.fixture
def repository(make_repository: MakeRepository) -> Repository:
    found = make_repository("tasks/a")
    found.add_task("tasks/b", {"instruction.md": "Do something else.\n"})
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
def test_cached_commit_needs_no_network(
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
        assert load(cache_dir, told, repo=f"{repository.url}@{commit}", **options) == first


def test_unreachable_branch_is_refused_but_its_commit_runs(
    repository: Repository, cache_dir: Path, told: list[str]
) -> None:
    first = load(cache_dir, told, repo=repository.url)
    shutil.rmtree(repository.path)
    for ref in ("", "@main"):
        with pytest.raises(PreflightError, match=r"cannot be fetched: .*named by all its digits, needs no network"):
            load(cache_dir, told, repo=repository.url + ref)
    assert load(cache_dir, told, repo=f"{repository.url}@{first['a']}") == first


@pytest.mark.parametrize("ref", ["", "@main", "@v1"])
def test_moved_ref_is_fetched(repository: Repository, cache_dir: Path, told: list[str], ref: str) -> None:
    repository.git("tag", "v1")
    repository.git("branch", "later/main")  # whose name ends as that of another
    first = load(cache_dir, told, repo=repository.url + ref)
    repository.add_task("tasks/c")
    second = repository.commit()
    repository.git("tag", "--force", "--annotate", "--message=v1", "v1")
    found = load(cache_dir, told, repo=repository.url + ref)
    assert found == dict.fromkeys(("a", "b", "c"), second) != first
    assert told == []


def test_deleted_branch_is_reported(repository: Repository, cache_dir: Path, told: list[str]) -> None:
    repository.git("branch", "side")
    load(cache_dir, told, repo=f"{repository.url}@side")
    repository.git("branch", "-D", "side")
    with pytest.raises(PreflightError, match="has no branch or tag 'side'"):
        load(cache_dir, told, repo=f"{repository.url}@side")


def test_unchanged_branch_needs_one_request(
    repository: Repository, cache_dir: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(cache_dir, told, repo=repository.url)
    trace = cache_dir / "trace"
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
    monkeypatch.setattr("ares_exp.tasks.task_sources.git_tasks._PASSED_ON", ("GIT_TRACE2",))
    assert load(cache_dir, told, repo=repository.url) == first
    names = [one for one in map(json.loads, trace.read_text().splitlines()) if one["event"] == "cmd_name"]
    commands = [one["name"] for one in names if one["hierarchy"] == one["name"]]
    assert commands == ["ls-remote", "ls-tree", "ls-tree"], "of which one needs a network"


def test_error_contains_the_git_message(tmp_path: Path) -> None:
    said = r"`git rev-parse` failed with exit code 128: fatal: not a git repository.*[^.]\.$"
    with pytest.raises(GitError, match=said):
        Git(timeout_sec=60).run("rev-parse", "HEAD", git_dir=tmp_path)


def test_missing_git_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="need the program `git`, which is not on PATH"):
        Git(timeout_sec=60).run("version")


def test_silent_server_times_out(silent_server: socket.socket, tmp_path: Path) -> None:
    url = f"git://127.0.0.1:{silent_server.getsockname()[1]}/tasks"
    with pytest.raises(PreflightError, match=r"`git ls-remote` was killed after 0\.3 seconds.*env\.git_timeout_sec"):
        Git(timeout_sec=0.3).run("ls-remote", "--", url)


def test_another_thread_can_stop_git(silent_server: socket.socket) -> None:
    git, errors = Git(timeout_sec=60), []
    url = f"git://127.0.0.1:{silent_server.getsockname()[1]}/tasks"

    def run() -> None:
        try:
            git.run("ls-remote", "--", url)
        except PreflightError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    connection, _ = silent_server.accept()
    with connection:
        git.stop()
        thread.join()
        connection.settimeout(30)
        while connection.recv(4096):  # its request, then the end: nothing of git is left
            pass
    [error] = errors
    assert error.startswith("`git ls-remote` was stopped.")
    with pytest.raises(PreflightError, match="stopped"):
        git.run("version")


def test_excess_output_is_cut_off(monkeypatch: pytest.MonkeyPatch, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/a")
    monkeypatch.setattr(child_process, "MAX_OUTPUT_BYTES", 20)
    with pytest.raises(PreflightError, match="printed more than 20 bytes"):
        Git(timeout_sec=60).run("ls-tree", "-r", "HEAD", git_dir=repository.path / ".git")


def test_git_variables_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("tasks/a")
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    listed = Git(timeout_sec=60).run("ls-tree", "--name-only", "HEAD", git_dir=repository.path / ".git")
    assert listed == b"tasks\n"


def test_hooks_and_helpers_are_not_started(
    monkeypatch: pytest.MonkeyPatch, make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("tasks/a")
    hook = repository.path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    git = Git(timeout_sec=60)
    git.run("checkout", "--detach", git_dir=repository.path / ".git", work_tree=repository.path)
    assert not (tmp_path / "hooked").exists()
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "ext")
    with pytest.raises(GitError, match="transport 'ext' not allowed"):
        git.run("ls-remote", "--", f"ext::touch {tmp_path}/helped")
    assert not (tmp_path / "helped").exists()
    assert os.environ["GIT_ALLOW_PROTOCOL"] == "ext"


LOAD = """
import json, sys
from ares_exp.containers.user_cache import changing, workspace
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
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_share_the_fetched_tasks(make_repository: MakeRepository, cache_dir: Path) -> None:
    repository = make_repository("tasks/a", "tasks/b", "tasks/c")
    with ExitStack() as stack:
        options = {"repo": repository.url, "cache_dir": str(cache_dir)}
        both = [stack.enter_context(loading(**options)) for _ in range(2)]
        for process in both:
            process.stdin.write("go\n")
            process.stdin.flush()
        first, second = (process.communicate(timeout=60)[0] for process in both)
    assert first == second
    assert [Path(path).name for path, _ in json.loads(first)] == ["a", "b", "c"]
    assert sorted(path.name for path in cache_dir.glob("*/files/*/tasks/*")) == ["a", "b", "c"]
    assert len([*cache_dir.iterdir()]) == 1


@pytest.mark.once
def test_git_dies_with_its_parent_process(
    silent_server: socket.socket, make_repository: MakeRepository, cache_dir: Path
) -> None:
    url = f"git://127.0.0.1:{silent_server.getsockname()[1]}/tasks"
    with loading(repo=url, cache_dir=str(cache_dir)) as process:
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
    assert [path.name for path in cache_dir.glob("*/files/*/tasks/*")] == ["a"]


def test_interrupted_check_out_is_completed(repository: Repository, cache_dir: Path, told: list[str]) -> None:
    load(cache_dir, told, repo=repository.url, tasks="a")
    (task,) = cache_dir.glob("*/files/*/tasks/a")
    (git_dir,) = cache_dir.glob("*/git")
    (task / "instruction.md").write_text("Do")
    (task / "tests" / "test.sh").unlink()
    (git_dir / "index").unlink()
    (git_dir / "index.lock").touch()
    (git_dir / "unfinished").touch()
    commit = repository.git("rev-parse", "HEAD")
    shutil.rmtree(repository.path)
    load(cache_dir, told, repo=f"{repository.url}@{commit}", tasks="a")
    assert (task / "instruction.md").read_text() == "Do it.\n"
    assert (task / "tests" / "test.sh").exists()


def test_killed_process_leaves_no_partial_clone(cache_dir: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom ares_exp.containers.user_cache import workspace\n"
        "with workspace(Path(sys.argv[1]), 'fetch') as place:\n"
        "    (place / 'clone').mkdir()\n    print('half', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(cache_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        with workspace(cache_dir, "fetch"):  # another run does not disturb it
            assert len(list(cache_dir.glob("*/clone"))) == 1
        process.kill()
        process.wait()
    with workspace(cache_dir, "fetch") as place:
        assert list(cache_dir.iterdir()) == [place]
    assert list(cache_dir.iterdir()) == []


@pytest.mark.parametrize("stopped", [True, False])
def test_wait_for_another_process_is_bounded(cache_dir: Path, stopped: bool) -> None:
    cache_dir.mkdir()
    stop = threading.Event()
    with changing(cache_dir, stop=stop, timeout_sec=60):
        if stopped:
            stop.set()
        with (
            pytest.raises(TimeoutError, match=f"Another process is changing {cache_dir}"),
            changing(cache_dir, stop=stop, timeout_sec=60 if stopped else 0),
        ):
            pass


def test_unwritable_directory_is_reported(repository: Repository, tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=r"Tasks cannot be fetched into .*env\.cache_dir"):
        load(tmp_path / "file", told, repo=repository.url)


def test_default_directory_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ares_exp" / "tasks"
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_cache_dir() == Path.home() / ".cache" / "ares_exp" / "tasks"
