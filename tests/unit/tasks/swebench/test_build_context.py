from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.images.image_build import find_buildkit_feature
from ares_exp.errors import ConfigError, GitError
from ares_exp.tasks.swebench.build_context import BuildOptions, make_context
from ares_exp.tasks.swebench.rows import SweBenchRow, parse_row
from ares_exp.tasks.task_sources.git_command import Git
from tests.swebench_rows import BUGGY, git

pytestmark = pytest.mark.once

Repository = tuple[Path, str]


@pytest.fixture
def parsed(row: dict[str, Any]) -> SweBenchRow:
    return parse_row(row, "here")


def options(at: Repository, tmp_path: Path, **more: Any) -> BuildOptions:
    return BuildOptions(**{"repository": str(at[0].parents[1]), "cache_dir": tmp_path / "cache", **more})


def make(row: SweBenchRow, chosen: BuildOptions) -> Path:
    return make_context(row, chosen, Git(timeout_sec=60))


@pytest.mark.parametrize("place", ["{folder}", "{folder}/demo/calc", "{folder}/{repo}", "file://{folder}/{repo}"])
def test_the_context_has_the_past_and_no_future(
    repository: Repository, parsed: SweBenchRow, tmp_path: Path, place: str
) -> None:
    place = place.replace("{folder}", str(repository[0].parents[1]))
    context = make(parsed, options(repository, tmp_path, repository=place))
    work_tree = tmp_path / "testbed"
    work_tree.mkdir()
    (context / "repository").rename(work_tree / ".git")
    git(work_tree, "reset", "--hard", "--quiet")
    assert (work_tree / "calc.py").read_text() == BUGGY
    assert git(work_tree, "log", "--all", "--format=%H").split()[0] == repository[1]
    assert git(work_tree, "rev-list", "--all", "--count").strip() == "2"
    assert git(work_tree, "tag") == git(work_tree, "remote") == git(work_tree, "status", "--porcelain") == ""
    objects = git(work_tree, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
    assert objects.split().count("commit") == 2
    for path in (work_tree / ".git").rglob("*"):
        assert not path.is_file() or str(repository[0]).encode() not in path.read_bytes(), path


def test_a_context_is_made_once_for_each_content(repository: Repository, parsed: SweBenchRow, tmp_path: Path) -> None:
    chosen = options(repository, tmp_path)
    context = make(parsed, chosen)
    stamp = context.stat().st_ino
    assert make(parsed, chosen) == context
    assert context.stat().st_ino == stamp
    other = options(repository, tmp_path, pip_packages=("x==1",))
    assert other.context_dir(parsed) != context
    renamed = parsed.model_copy(update={"instance_id": "demo__calc-2"})
    assert chosen.context_dir(renamed) == context
    assert [path.name for path in (tmp_path / "cache" / "contexts").iterdir()] == [context.name]


def test_the_dockerfile_runs_commands_as_they_were_written(
    repository: Repository, parsed: SweBenchRow, tmp_path: Path
) -> None:
    odd = "printf '%s\\n' \"$HOME\" \\\n  > '/a b'"
    context = make(parsed, options(repository, tmp_path, setup=(odd,), pip_packages=("a>=1",), install=("make",)))
    lines = (context / "Dockerfile").read_text().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["FROM", "RUN", "COPY", "WORKDIR", "RUN", "RUN", "RUN"]
    assert json.loads(lines[1].removeprefix("RUN "))[-1] == odd
    assert json.loads(lines[5].removeprefix("RUN "))[-1] == "a>=1"
    assert find_buildkit_feature((context / "Dockerfile").read_text()) is None


def test_a_commit_that_is_not_there_is_told(repository: Repository, parsed: SweBenchRow, tmp_path: Path) -> None:
    lost = parsed.model_copy(update={"base_commit": "0" * 40})
    for place in (str(repository[0]), f"file://{repository[0]}"):
        with pytest.raises(GitError, match=r"demo__calc-1: .* does not give commit 0000"):
            make(lost, options(repository, tmp_path, repository=place))
    assert not list((tmp_path / "cache" / "contexts").iterdir())


def test_odd_options_are_refused(parsed: SweBenchRow) -> None:
    with pytest.raises(ConfigError, match=r"env\.base_image"):
        BuildOptions(base_image="x\nRUN y")
    for place in ("no/such/folder", "ext::sh -c id", "--upload-pack=id", "https://user:word@host/{repo}"):
        with pytest.raises(ConfigError, match=r"env\.repository"):
            BuildOptions(repository=place).source(parsed)


def test_the_mirror_of_a_remote_repository_is_copied_once(
    repository: Repository, parsed: SweBenchRow, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(repository[0]), str(away)], check=True, timeout=60)
    chosen = options(repository, tmp_path, repository=f"file://{away}")
    make(parsed, chosen)
    away.rename(tmp_path / "gone")
    again = options(repository, tmp_path, repository=f"file://{away}", install=("true",))
    assert (make(parsed, again) / "repository" / "HEAD").is_file()
