"""What an earlier run recorded: found by name, read with suspicion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.runs.resume.recorded_run import EpisodeRef, RecordedRun, starts_where_started
from ares_exp.trajectories.files.episode_file import dump_episode
from tests.unit.snapshots.golden_store import GOLDEN
from tests.unit.trajectories.chats import chat, write

HYDRA = """\
hydra:
  runtime:
    cwd: /somewhere
    config_sources:
    - {path: hydra.conf, schema: pkg, provider: hydra}
    - {path: /package/conf, schema: file, provider: main}
    - {path: /somewhere/options, schema: file, provider: command-line}
    - {path: /a/package/conf, schema: file, provider: ares_exp plugin nim}
    - {path: /else/options, schema: file, provider: hydra.searchpath in command-line}
    - {path: '', schema: structured, provider: schema}
"""


def row(episode_id: str, task: str, steps: int, outcome: str = "completed") -> str:
    return json.dumps({"episode_id": episode_id, "task_name": task, "num_steps": steps, "outcome": outcome}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three rows, the trajectory of one of them, and the trajectory of an episode without a row."""
    run = tmp_path / "s" / "0"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("- seed=1\n- env.tasks=[a,b]\n")
    (run / ".hydra" / "hydra.yaml").write_text(HYDRA)
    rows = row("fix__0__aaa1", "fix", 3) + row("fix__1__bbb2", "fix", 2, "agent_error") + row("sum__0__ccc3", "sum", 1)
    (run / "episodes.jsonl").write_text(rows + '{"episode_id": "torn')
    write(run / "trajectories" / "fix__0__aaa1.json", chat("fix__0__aaa1", "fix"))
    write(run / "trajectories" / "fix-more__0__ddd4.json", chat("fix-more__0__ddd4", "fix-more", length=2))
    return run


def test_a_run_records_its_overrides_and_folders(run: Path) -> None:
    recorded = RecordedRun(run)
    assert recorded.overrides() == ["seed=1", "env.tasks=[a,b]"]
    assert recorded.working_directory() == Path("/somewhere")
    assert recorded.config_dirs() == [Path("/somewhere/options"), Path("/else/options")]


def test_episodes_of_rows_trajectories_and_snapshots(run: Path) -> None:
    (run / "snapshots" / "sum__0__ccc3@4").mkdir(parents=True)
    (run / "snapshots" / "objects").mkdir()
    last_steps = {one.episode_id: one.last_step for one in RecordedRun(run).episodes()}
    assert last_steps == {"fix__0__aaa1": 2, "fix__1__bbb2": 2, "sum__0__ccc3": 4, "fix-more__0__ddd4": 0}


def test_an_episode_with_only_snapshots_is_found(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").touch()
    shutil.copytree(GOLDEN, tmp_path / "snapshots")
    (tmp_path / "snapshots" / "broken__0__aa@1").mkdir()
    [episode] = RecordedRun(tmp_path).episodes()
    assert (episode.episode_id, episode.task_name, episode.last_step) == ("hello__0__3f2a91bc", "hello", 3)
    assert EpisodeRef.parse(f"{tmp_path}/hello@3").step == 3


def test_a_killed_episode_is_found(run: Path) -> None:
    lines = list(dump_episode(chat("killed__0__e5", "killed", length=5)))
    (run / "trajectories" / "killed__0__e5.json").write_text("".join(lines[:3]))
    assert RecordedRun(run).episode("killed").last_step == 1


@pytest.mark.parametrize(
    ("name", "episode_id", "step"),
    [
        ("fix__0__aaa1", "fix__0__aaa1", None),
        ("fix__1", "fix__1__bbb2", None),
        ("fix__0__aaa1@2", "fix__0__aaa1", 2),
        ("sum@0", "sum__0__ccc3", 0),
        ("fix-more", "fix-more__0__ddd4", None),
        ("fix-", "fix-more__0__ddd4", None),
    ],
)
def test_names_of_episodes(run: Path, name: str, episode_id: str, step: int | None) -> None:
    ref = EpisodeRef.parse(f"{run}/{name}")
    assert ref.episode is not None
    assert (ref.run.path, ref.episode.episode_id, ref.step) == (run, episode_id, step)
    assert str(ref) == f"{run}/{episode_id}" + ("" if step is None else f"@{step}")
    assert str(EpisodeRef.parse(str(ref))) == str(ref)


def test_a_task_name_selects_its_last_episode(run: Path) -> None:
    with (run / "episodes.jsonl").open("w") as file:
        file.write(row("sum__0__fff6", "sum", 1, "lost") + row("sum__0__ccc3", "sum", 4))
    assert [RecordedRun(run).episode(name).episode_id for name in ("sum", "sum__0")] == ["sum__0__ccc3"] * 2


def test_a_reference_may_omit_the_episode(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    for text in ("s/0", "s/0/", "./s/0", str(run)):
        ref = EpisodeRef.parse(text)
        assert (ref.run.path.resolve(), ref.episode, ref.step) == (run, None, None)
    monkeypatch.chdir(run)
    assert str(EpisodeRef.parse("sum@0")) == "sum__0__ccc3@0"
    assert EpisodeRef.parse(".").episode is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0/fix", ["means 2 episodes", "fix__0__aaa1, fix__1__bbb2"]),
        ("0/fix__0__aa12", ["no episode 'fix__0__aa12'", "Did you mean `fix__0__aaa1`"]),
        ("0/zzz", ["no episode 'zzz'", "It has fix__0__aaa1"]),
        ("0/fix__0@3", ["no step 3", "0 to 2"]),
        ("0/fix-more@1", ["no step 1", "0 alone"]),
        ("1/fix", ["no run", "folder of runs (0)", "Name one"]),
        ("", ["folder of runs (0)"]),
        ("0/sum@x", ["no episode 'sum@x'"]),
        ("x" * 300, ["got '/"]),
        ("0\0", ["no run"]),
    ],
)
def test_a_missing_episode_is_an_error(run: Path, name: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EpisodeRef.parse(f"{run.parent}/{name}")
    assert all(text in str(caught.value) for text in expected), caught.value


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        EpisodeRef.parse(str(tmp_path))
    with pytest.raises(ConfigError, match="expected a run directory"):
        EpisodeRef.parse(str(tmp_path / "gone" / "far"))


def test_a_run_without_records(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text("[1]\nnull\n{}\n" + "[" * 100_000 + '\n{"episode_id": "a\n')
    with pytest.raises(ConfigError, match="found none"):
        RecordedRun(tmp_path).episode("a")
    with pytest.raises(ConfigError, match=r"policy=replay policy\.trajectory"):
        RecordedRun(tmp_path).overrides()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("seed: 1\n", id="mapping"),
        pytest.param("- 1\n", id="number"),
        pytest.param("[", id="torn"),
    ],
)
def test_broken_records_are_reported(run: Path, text: str) -> None:
    (run / ".hydra" / "overrides.yaml").write_text(text)
    (run / ".hydra" / "hydra.yaml").write_text(text)
    for read in (RecordedRun(run).overrides, RecordedRun(run).config_dirs, RecordedRun(run).working_directory):
        with pytest.raises(ConfigError, match="is broken") as caught:
            read()
        assert len(str(caught.value)) < 600


def test_a_broken_trajectory_leaves_the_others(run: Path) -> None:
    (run / "trajectories" / "fix__0__aaa1.json").write_text("{")
    assert RecordedRun(run).episode("fix-more").last_step == 0
    assert RecordedRun(run).episode("fix__0").last_step == 2, "by its row"


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("env.path", {"env.path"}, True),
        ("env.registry", {"env.dataset"}, True),
        ("snapshot.dir", {"env.repo"}, True),
        ("env.path", {"env.repo"}, False),
        ("env.path", {"env.git_url"}, False),
        ("env.registry", {"env.repo"}, False),
        ("env.dataset", set(), False),
    ],
)
def test_which_values_are_paths_of_this_machine(key: str, given: set[str], expected: bool) -> None:
    assert starts_where_started(key, given) is expected
