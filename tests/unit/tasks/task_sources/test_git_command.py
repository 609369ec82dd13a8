"""Real git commands: what bounds them, what ends them, and what they are not given."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from ares_exp.errors import GitError, PreflightError
from ares_exp.tasks import child_process
from ares_exp.tasks.task_sources.git_command import Git
from tests.unit.tasks.task_sources.conftest import MakeRepository


def test_what_a_command_prints() -> None:
    assert Git(timeout_sec=60).run("version").startswith(b"git version")


def test_what_git_says_is_in_the_error(tmp_path: Path) -> None:
    said = r"`git rev-parse` failed with exit code 128: fatal: not a git repository.*[^.]\.$"
    with pytest.raises(GitError, match=said):
        Git(timeout_sec=60).run("rev-parse", "HEAD", git_dir=tmp_path)


def test_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="Expected the program `git` on PATH, found none"):
        Git(timeout_sec=60).run("version")


def test_a_silent_server_is_given_up(silent_server: socket.socket, tmp_path: Path) -> None:
    url = f"git://127.0.0.1:{silent_server.getsockname()[1]}/tasks"
    with pytest.raises(PreflightError, match=r"`git ls-remote` was killed after 0\.3 seconds.*env\.git_timeout_sec"):
        Git(timeout_sec=0.3).run("ls-remote", "--", url)


def test_another_thread_stops_it(silent_server: socket.socket) -> None:
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


def test_a_flood_is_cut_off(monkeypatch: pytest.MonkeyPatch, make_repository: MakeRepository) -> None:
    repository = make_repository("tasks/a")
    monkeypatch.setattr(child_process, "MAX_OUTPUT_BYTES", 20)
    with pytest.raises(PreflightError, match="expected to print at most 20 bytes"):
        Git(timeout_sec=60).run("ls-tree", "-r", "HEAD", git_dir=repository.path / ".git")


def test_another_repository_in_the_environment_is_not_meant(
    monkeypatch: pytest.MonkeyPatch, make_repository: MakeRepository, tmp_path: Path
) -> None:
    repository = make_repository("tasks/a")
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    listed = Git(timeout_sec=60).run("ls-tree", "--name-only", "HEAD", git_dir=repository.path / ".git")
    assert listed == b"tasks\n"


def test_no_hook_and_no_helper_is_started(
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
