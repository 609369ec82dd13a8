"""Recorded runs, and their sessions."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult, Outcome, RunSummary
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.runs.resume.recorded_run import EpisodeRef, RecordedRun, starts_where_started
from ares_exp.runs.resume.session import Session, close_session, open_session
from ares_exp.tasks.task_files import with_files
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


def test_run_records_its_overrides_and_folders(run: Path) -> None:
    recorded = RecordedRun(run)
    assert recorded.overrides() == ["seed=1", "env.tasks=[a,b]"]
    assert recorded.working_directory() == Path("/somewhere")
    assert recorded.config_dirs() == [Path("/somewhere/options"), Path("/else/options")]


def test_episodes_come_from_rows_trajectories_and_snapshots(run: Path) -> None:
    (run / "snapshots" / "sum__0__ccc3@4").mkdir(parents=True)
    (run / "snapshots" / "objects").mkdir()
    last_steps = {one.episode_id: one.last_step for one in RecordedRun(run).episodes()}
    assert last_steps == {"fix__0__aaa1": 2, "fix__1__bbb2": 2, "sum__0__ccc3": 4, "fix-more__0__ddd4": 0}


def test_episode_with_only_snapshots_is_found(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").touch()
    shutil.copytree(GOLDEN, tmp_path / "snapshots")
    (tmp_path / "snapshots" / "broken__0__aa@1").mkdir()
    [episode] = RecordedRun(tmp_path).episodes()
    assert (episode.episode_id, episode.task_name, episode.last_step) == ("hello__0__3f2a91bc", "hello", 3)
    assert EpisodeRef.parse(f"{tmp_path}/hello@3").step == 3


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
def test_episode_name_may_be_a_prefix(run: Path, name: str, episode_id: str, step: int | None) -> None:
    ref = EpisodeRef.parse(f"{run}/{name}")
    assert ref.episode is not None
    assert (ref.run.path, ref.episode.episode_id, ref.step) == (run, episode_id, step)
    assert str(ref) == f"{run}/{episode_id}" + ("" if step is None else f"@{step}")
    assert str(EpisodeRef.parse(str(ref))) == str(ref)


def test_task_name_selects_its_last_episode(run: Path) -> None:
    with (run / "episodes.jsonl").open("w") as file:
        file.write(row("sum__0__fff6", "sum", 1, "lost") + row("sum__0__ccc3", "sum", 4))
    assert [RecordedRun(run).episode(name).episode_id for name in ("sum", "sum__0")] == ["sum__0__ccc3"] * 2


def test_reference_may_omit_the_episode(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("0/fix", ["matches 2 episodes", "fix__0__aaa1, fix__1__bbb2"]),
        ("0/fix__0__aa12", ["no episode 'fix__0__aa12'", "Did you mean `fix__0__aaa1`"]),
        ("0/zzz", ["no episode 'zzz'", "It has fix__0__aaa1"]),
        ("0/fix__0@3", ["no step 3", "0 to 2"]),
        ("0/fix-more@1", ["no step 1", "its only step is 0"]),
        ("1/fix", ["no run", "folder of runs (0)", "Name one"]),
        ("", ["folder of runs (0)"]),
        ("0/sum@x", ["no episode 'sum@x'"]),
        ("x" * 300, ["got '/"]),
        ("0\0", ["no run"]),
    ],
)
def test_missing_episode_is_an_error(run: Path, name: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EpisodeRef.parse(f"{run.parent}/{name}")
    assert all(text in str(caught.value) for text in expected), caught.value


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        EpisodeRef.parse(str(tmp_path))
    with pytest.raises(ConfigError, match="expected a run directory"):
        EpisodeRef.parse(str(tmp_path / "gone" / "far"))


def test_run_without_records_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text("[1]\nnull\n{}\n" + "[" * 100_000 + '\n{"episode_id": "a\n')
    with pytest.raises(ConfigError, match="no recorded episodes"):
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


def test_broken_trajectory_does_not_affect_others(run: Path) -> None:
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
        ("agent.mount", set(), True),
        ("agent.files./opt/agent.py", set(), True),
    ],
)
def test_local_path_options_are_recognized(key: str, given: set[str], expected: bool) -> None:
    assert starts_where_started(key, given) is expected


URL = "http://127.0.0.1:8000/v1"
CONFIG: dict[str, Any] = {
    "name": "x",
    "seed": 1,
    "concurrency": 4,
    "attempts": 2,
    "resume_force": False,
    "env": {"_target_": "e", "path": "tasks", "limit": None},
    "agent": {"_target_": "a", "max_output_chars": 100},
    "policy": {"_target_": "p", "temperature": 0.5, "timeout_sec": 600.0, "prices": {"m": 1}, "base_url": URL},
    "collector": {"_target_": "c"},
}
TASKS = {"fix": "d1", "sum": "d2"}
PROVENANCE = {"hostname": "here", "ares_exp_version": "1"}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes.jsonl").touch()
    return RunDir(tmp_path / "run")


def opened(run_dir: RunDir, tasks: Mapping[str, str | None] = TASKS, **changed: Any) -> Session:
    config = {**CONFIG, **changed}
    return open_session(run_dir, config, PROVENANCE, tasks, ["beware"])


def sessions(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.sessions.read_text().splitlines()]


def test_run_starts_and_is_resumed(run_dir: RunDir) -> None:
    started = opened(run_dir)
    files = {path: path.read_bytes() for path in (run_dir.config, run_dir.provenance)}
    assert started.earlier is None
    assert json.loads(files[run_dir.provenance])["warnings"] == ["beware"]
    resumed = opened(run_dir)
    assert resumed.run_id == started.run_id
    assert resumed.earlier is not None
    assert resumed.earlier.results == ()
    assert {path: path.read_bytes() for path in files} == files
    assert [line["resumed"] for line in sessions(run_dir)] == [False, True]


def test_run_killed_before_its_config_starts_again(run_dir: RunDir) -> None:
    opened(run_dir)
    run_dir.config.unlink()
    assert not run_dir.has_run
    assert opened(run_dir).earlier is None


@pytest.mark.parametrize(
    "changed",
    [
        {"concurrency": 1, "attempts": 9, "name": "y", "collector": None},
        {"policy": {**CONFIG["policy"], "timeout_sec": 1.0}},
        {"policy": {**CONFIG["policy"], "base_url": "http://127.0.0.1:8001/v1/"}},
        {"snapshot": {"_target_": "s"}, "retry": {"container_error": 2}, "budget": {"cost": 5}},
    ],
)
def test_harmless_options_may_change(run_dir: RunDir, changed: dict[str, Any]) -> None:
    opened(run_dir)
    assert opened(run_dir, **changed).earlier is not None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"policy": {**CONFIG["policy"], "temperature": 1}}, "`policy.temperature` was 0.5 and is 1"),
        ({"policy": {**CONFIG["policy"], "top_p": 1}}, "`policy.top_p` was 'nothing' and is 1"),
        ({"policy": {**CONFIG["policy"], "base_url": "http://other:8000/v1"}}, f"`policy.base_url` was '{URL}'"),
        ({"policy": {**CONFIG["policy"], "base_url": "http://[x/v1"}}, f"`policy.base_url` was '{URL}'"),
        ({"policy": {"_target_": "q"}}, "`policy._target_` was 'p' and is 'q'"),
        ({"policy": {**CONFIG["policy"], "prices": {"m": 2}}}, "`policy.prices.m` was 1 and is 2"),
        ({"agent": None}, "`agent` was 'nothing' and is None"),
        ({"seed": 2}, "`seed` was 1 and is 2"),
        ({"env": {**CONFIG["env"], "path": "others"}}, "`env.path` was 'tasks' and is 'others'"),
    ],
)
def test_another_experiment_is_refused(run_dir: RunDir, changed: dict[str, Any], expected: str) -> None:
    opened(run_dir)
    with pytest.raises(ConfigError) as caught:
        opened(run_dir, **changed)
    assert expected in str(caught.value)
    assert "resume_force=true" in str(caught.value)
    assert len(sessions(run_dir)) == 1
    assert opened(run_dir, resume_force=True, **changed).earlier is not None


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"fix": "d1"}, "1 task is no longer selected (sum)"),
        ({**TASKS, "new": "d3", "more": "d4"}, "2 tasks are new (new, more)"),
        ({"fix": "other", "sum": "d2"}, "the files of 1 task have changed (fix)"),
    ],
)
def test_another_task_set_is_refused(run_dir: RunDir, tasks: dict[str, str], expected: str) -> None:
    opened(run_dir)
    with pytest.raises(ConfigError) as caught:
        opened(run_dir, tasks)
    assert expected in str(caught.value)


def test_changed_hint_file_is_rejected_by_name(run_dir: RunDir) -> None:
    opened(run_dir, {name: with_files(digest, {"/a/hint.md": "old"}) for name, digest in TASKS.items()})
    assert opened(run_dir, TASKS).earlier is not None
    with pytest.raises(ConfigError, match=r"it has changed: other files that agents read have changed \(/a/hint.md\)"):
        opened(run_dir, {name: with_files(digest, {"/a/hint.md": "new"}) for name, digest in TASKS.items()})


def test_long_list_of_differences_is_cut(run_dir: RunDir) -> None:
    opened(run_dir)
    with pytest.raises(ConfigError, match="; and 5 more"):
        opened(run_dir, policy={f"k{number}": number for number in range(5)}, seed=3)


def test_paths_are_compared_independent_of_working_directory(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened(run_dir)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert opened(run_dir, env={**CONFIG["env"], "path": "../tasks"}).earlier is not None
    with pytest.raises(ConfigError, match=r"`env\.path` was"):
        opened(run_dir)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.yaml", "provenance.json"])
def test_broken_records_are_named(run_dir: RunDir, name: str, text: str) -> None:
    opened(run_dir)
    (run_dir.path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        opened(run_dir)


def test_seconds_of_all_sessions_are_added_up(run_dir: RunDir) -> None:
    opened(run_dir)
    lines = [
        '{"started": 100.0}',
        '{"ended": 110.0}',
        '{"started": 200.0}',
        '{"beg{"started": 300.0}',
        '{"started": 400.0}',
    ]
    run_dir.sessions.write_text("\n".join([*lines, '{"ended": 401.0}']) + "\n")
    killed = EpisodeResult("a", "fix", 0, 1, Outcome.COMPLETED, 1.0, started_at=201.0, finished_at=205.0)
    run_dir.append_episodes(dump_json(killed.to_dict()))
    earlier = opened(run_dir).earlier
    assert earlier is not None
    assert earlier.wall_sec == 16.0


@pytest.mark.parametrize("text", ["", '{"started"', '{"ended": 5.0}\n', "[]\n5\n"])
def test_incomplete_session_counts_no_time(run_dir: RunDir, text: str) -> None:
    opened(run_dir)
    run_dir.sessions.write_text(text)
    earlier = opened(run_dir).earlier
    assert earlier is not None
    assert earlier.wall_sec == 0.0


def test_end_of_a_session_is_recorded(run_dir: RunDir) -> None:
    opened(run_dir)
    run_dir.responses.mkdir()
    close_session(run_dir, RunSummary(planned=1, results=(), interrupted=True))
    assert sessions(run_dir)[-1]["interrupted"] is True
    assert not run_dir.responses.exists()


def test_useful_responses_are_kept(run_dir: RunDir) -> None:
    opened(run_dir)
    run_dir.responses.mkdir()
    (run_dir.responses / "a.jsonl").touch()
    close_session(run_dir, RunSummary(planned=1, results=()))
    assert (run_dir.responses / "a.jsonl").exists()
