"""The cache of fetched tasks: whole or not there, whoever else uses it, and however a process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.errors import PreflightError
from ares_exp.tasks.task_contract import TaskOrigin
from ares_exp.tasks.task_sources.cache import TaskCache, default_cache_dir

ORIGIN = TaskOrigin("file:///tasks", "a" * 40, "tasks/one")

HALF_A_TASK = """
import sys, time
from pathlib import Path
from ares_exp.tasks.task_sources.cache import TaskCache

with TaskCache(Path(sys.argv[1])).workspace() as workspace:
    (workspace / "stage" / "one").mkdir(parents=True)
    (workspace / "stage" / "one" / "task.toml").write_text("half")
    print("half", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cache(cache_dir: Path) -> TaskCache:
    return TaskCache(cache_dir)


def keep(cache: TaskCache, text: str = "whole") -> Path:
    """Makes a task, and moves it to its place in the cache."""
    place = cache.task(ORIGIN, "one")
    with cache.workspace() as workspace:
        (workspace / "stage").mkdir()
        (workspace / "stage" / "task.toml").write_text(text)
        cache.keep(workspace / "stage", place)
    return place


def test_what_is_kept_is_found(cache: TaskCache, cache_dir: Path) -> None:
    place = cache.task(ORIGIN, "one")
    assert not cache.has(place)
    assert not any(cache_dir.iterdir())
    assert keep(cache) == place
    assert cache.has(place)
    assert (place / "task.toml").read_text() == "whole"
    assert place.name == "one"
    assert [path.name for path in cache_dir.iterdir()] == [place.parent.name]


@pytest.mark.parametrize(
    "other",
    [
        TaskOrigin("file:///others", "a" * 40, "tasks/one"),
        TaskOrigin("file:///tasks", "b" * 40, "tasks/one"),
        TaskOrigin("file:///tasks", "a" * 40, "more/one"),
    ],
)
def test_another_repository_commit_or_path_is_another_task(cache: TaskCache, other: TaskOrigin) -> None:
    keep(cache)
    assert not cache.has(cache.task(other, "one"))


def test_who_comes_second_takes_what_is_there(cache: TaskCache) -> None:
    assert keep(cache, "first") == keep(cache, "second")
    assert (cache.task(ORIGIN, "one") / "task.toml").read_text() == "first"


def test_an_emptied_task_is_made_again(cache: TaskCache) -> None:
    (keep(cache) / "task.toml").unlink()
    assert not cache.has(cache.task(ORIGIN, "one"))
    assert (keep(cache, "again") / "task.toml").read_text() == "again"


def test_something_else_in_its_place_is_left_alone(cache: TaskCache) -> None:
    place = cache.task(ORIGIN, "one")
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    with pytest.raises(PreflightError, match=r"Cannot write .*env\.cache_dir"):
        keep(cache)
    assert place.read_text() == "mine"


def test_a_killed_process_leaves_nothing_half(cache_dir: Path) -> None:
    command = [sys.executable, "-c", HALF_A_TASK, str(cache_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        with TaskCache(cache_dir).workspace():  # another run does not disturb it
            assert len(list(cache_dir.glob("*/stage/one/task.toml"))) == 1
        process.kill()
        process.wait()
    assert len(list(cache_dir.glob("*/stage/one/task.toml"))) == 1
    cache = TaskCache(cache_dir)
    assert not cache.has(cache.task(ORIGIN, "one"))
    with cache.workspace() as workspace:
        assert list(cache_dir.iterdir()) == [workspace]
    assert list(cache_dir.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(PreflightError, match=r"Expected to write fetched tasks .*env\.cache_dir"),
        TaskCache(tmp_path / "file").workspace(),
    ):
        pass


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ares_exp" / "tasks"
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_cache_dir() == Path.home() / ".cache" / "ares_exp" / "tasks"
