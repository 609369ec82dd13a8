"""What an offline W&B run holds: read back from the file that it leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.results import EpisodeResult, ErrorInfo, Outcome
from ares_exp.run_summary import RunSummary
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_recording.identity import read_identity
from ares_exp.trackers.wandb_tracker import WandbTracker
from tests.unit.trackers.tracked_run import RESULTS, SECRET, episode, run_info
from tests.unit.trackers.wandb_file import WandbFile
from tests.unit.trajectories.chats import chat

pytestmark = pytest.mark.usefixtures("no_account")


def record(info: RunInfo, results: Sequence[EpisodeResult] = RESULTS, **settings: object) -> WandbTracker:
    """Records a whole session; the summary is over earlier sessions, too."""
    tracker = WandbTracker(**{"finish_timeout_sec": 100.0, **settings})  # type: ignore[arg-type]
    tracker.start(info)
    for result in results:
        tracker.log_episode(result, chat(result.episode_id, result.task_name))
    everything = (*info.earlier, *results)
    tracker.finish(RunSummary(len(everything), everything, wall_sec=4.0))
    return tracker


def paths(artifact: object) -> set[str]:
    return {entry.path for entry in artifact.manifest.contents}  # type: ignore[attr-defined]


def write_results(run_dir: Path) -> None:
    (run_dir / "trajectories").mkdir(parents=True)
    (run_dir / "episodes.jsonl").write_text("{}\n")
    (run_dir / "results.json").write_text("{}\n")
    (run_dir / "trajectories" / "e1.json").write_text("{}")
    (run_dir / "trajectories" / "e2.json.partial").write_text("{}")
    (run_dir / "trajectories" / "all.jsonl").write_text("{}\n")


def test_config_names_and_totals(tmp_path: Path) -> None:
    info = run_info(tmp_path, group="a sweep", job_type="evaluation", tags=("one",))
    assert record(info, project="a-project", tags=("two", "one")).failures == 0
    recorded = WandbFile(tmp_path)
    assert (recorded.run.run_id, recorded.run.project) == ("run-1", "a-project")
    assert (recorded.run.run_group, recorded.run.job_type) == ("a sweep", "evaluation")
    assert (recorded.run.display_name, sorted(recorded.run.tags)) == ("a name", ["one", "two"])
    assert recorded.config["seed"] == 3
    assert recorded.config["policy"] == {"api_key": "***", "api_key_env": "OPENAI_API_KEY"}
    assert recorded.config["provenance"] == {"argv": ["ares_exp", "seed=3"]}
    assert (recorded.summary["run/planned"], recorded.summary["run/scored"]) == (3, 2)
    assert recorded.summary["run/outcomes/agent_error"] == 1
    assert recorded.summary["run/mean_reward"] == 0.75
    assert recorded.summary["stat/mean_reward"] == 0.5  # there, the error counts as zero
    assert recorded.summary["stat/scored_only/mean_reward"] == 0.75
    assert recorded.summary["objective"] == 0.5
    assert recorded.exit_codes == [1]


def test_the_objective_is_the_metric_that_the_config_names(tmp_path: Path) -> None:
    record(run_info(tmp_path, config={"objective": "scored_only/mean_reward"}))
    assert WandbFile(tmp_path).summary["objective"] == 0.75


def test_every_try_has_a_row_against_their_number_and_against_time(tmp_path: Path) -> None:
    began = time.time()
    results = [replace(one, started_at=began, finished_at=began + 100 + n) for n, one in enumerate(RESULTS)]
    record(run_info(tmp_path), results)
    recorded = WandbFile(tmp_path)
    first, second, third = recorded.rows
    assert (first["episode/reward"], first["episode/num_steps"]) == (1.0, 1)
    assert first["episode/duration_sec"] == pytest.approx(100)
    assert (first["episode/prompt_tokens"], first["episode/generated_tokens"], first["episode/cost"]) == (100, 10, 0.25)
    assert "episode/reward" not in second
    assert "progress/mean_reward" not in second
    assert (third["outcome/completed"], third["outcome/agent_error"]) == (2, 1)
    assert (third["progress/finished"], third["progress/mean_reward"]) == (3, 0.75)
    wall = [row["progress/wall_sec"] for row in recorded.rows]
    assert wall[0] == pytest.approx(100, abs=1)
    assert [later - wall[0] for later in wall] == pytest.approx([0, 1, 2])
    for key in ("episode/*", "outcome/*", "progress/mean_reward"):
        assert recorded.step_metrics[key] == "progress/finished"
    for key in ("system/*", "progress/finished"):
        assert recorded.step_metrics[key] == "progress/wall_sec"


def test_an_attempt_that_is_tried_again_counts_by_its_last_try(tmp_path: Path) -> None:
    again = replace(episode(2, 1.0), episode_id="e2-again", retry=1)
    record(run_info(tmp_path), (*RESULTS, again))
    last = WandbFile(tmp_path).rows[-1]
    assert (last["progress/finished"], last["outcome/completed"], last["outcome/agent_error"]) == (4, 3, 0)
    assert last["progress/mean_reward"] == pytest.approx(2.5 / 3)


def test_samples_of_the_runner_have_time_as_their_axis(tmp_path: Path) -> None:
    tracker = WandbTracker()
    tracker.start(run_info(tmp_path))
    tracker.log_system({"system/loop_lag_sec": 0.25, "system/containers": 3})
    tracker.finish(RunSummary(0, ()))
    (row,) = [row for row in WandbFile(tmp_path).history if "system/loop_lag_sec" in row]
    assert (row["system/loop_lag_sec"], row["system/containers"]) == (0.25, 3)
    assert 0 <= row["progress/wall_sec"] < 60
    assert "progress/finished" not in row


def test_the_table_has_every_try_once_with_a_readable_trajectory(tmp_path: Path) -> None:
    record(run_info(tmp_path))
    recorded = WandbFile(tmp_path)
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3"]
    row = recorded.table[1]
    assert (row["task"], row["attempt"], row["retry"], row["reward"]) == ("task2", 0, 0, None)
    assert (row["outcome"], row["error"], row["num_steps"]) == ("agent_error", "AgentError: boom", 2)
    assert (row["prompt_tokens"], row["generated_tokens"], row["cost"], row["duration_sec"]) == (100, 10, 0.25, 2.5)
    page = recorded.page(row["trajectory"])
    assert "Please do task2." in page
    assert "$ run 2" in page
    assert not (tmp_path / "wandb" / "scratch").exists()


def test_a_long_table_is_logged_in_few_increments_and_no_row_twice(tmp_path: Path) -> None:
    results = [episode(index, 1.0) for index in range(300)]
    record(run_info(tmp_path), results, log_trajectories=False, log_artifacts=False)
    recorded = WandbFile(tmp_path)
    assert [row["episode_id"] for row in recorded.table] == [result.episode_id for result in results]
    assert len(recorded.artifacts("wandb-run-incremental-table")) < 50
    assert recorded.summary["episodes.nrows"] == 300
    assert recorded.table[0]["trajectory"] is None


def test_histograms_are_over_the_attempts(tmp_path: Path) -> None:
    record(run_info(tmp_path))
    summary = WandbFile(tmp_path).summary
    for name, count in (("reward", 2), ("num_steps", 3), ("duration_sec", 3), ("generated_tokens", 3)):
        assert summary[f"attempts/{name}._type"] == "histogram"
        assert sum(summary[f"attempts/{name}.values"]) == count


def test_results_and_trajectories_become_an_artifact(tmp_path: Path) -> None:
    write_results(tmp_path)
    record(run_info(tmp_path))
    (artifact,) = WandbFile(tmp_path).artifacts("trajectories")
    assert artifact.name == "run-run-1-trajectories"
    assert paths(artifact) == {"episodes.jsonl", "results.json", "trajectories/e1.json", "trajectories/all.jsonl"}
    copied = {entry.path: "staging" in entry.local_path for entry in artifact.manifest.contents}
    assert copied["trajectories/all.jsonl"], "it grows when the run is resumed"
    assert not copied["trajectories/e1.json"]
    assert not artifact.use_after_commit


def test_the_task_set_is_an_input(tmp_path: Path) -> None:
    record(run_info(tmp_path, task_set=SAMPLES, tasks=("write-greeting", "count-records")))
    recorded = WandbFile(tmp_path)
    (artifact,) = recorded.artifacts("task-set")
    assert (artifact.name, artifact.use_after_commit) == ("task-set-samples", True)
    assert {path.partition("/")[0] for path in paths(artifact)} == {"tasks.json", "write-greeting", "count-records"}
    assert "write-greeting/tests/test.sh" in paths(artifact)
    assert recorded.config["inputs"] == [{"name": "task-set-samples", "digest": artifact.digest}]


def test_of_a_large_task_set_there_are_digests(tmp_path: Path) -> None:
    record(run_info(tmp_path, task_set=SAMPLES, tasks=("write-greeting",)), task_set_limit_mb=0)
    (artifact,) = WandbFile(tmp_path).artifacts("task-set")
    (entry,) = artifact.manifest.contents
    assert json.loads(Path(entry.local_path).read_text())["write-greeting"].startswith("sha256:")


def test_of_tasks_without_a_folder_there_are_names_digests_and_where_they_are_from(tmp_path: Path) -> None:
    origins = {"b": {"git_url": "https://example.org/t", "git_commit": "0" * 40, "path": "tasks/b"}}
    known = {
        "tasks": ("b", "a"),
        "task_digests": {"a": None, "b": "sha256:1"},
        "config": {"env": {"_target_": "pkg.Tasks", "repo": f"https://u:{SECRET}@example.org/t", "api_key": SECRET}},
        "provenance": {"task_origins": origins},
    }
    record(run_info(tmp_path / "one", **known))
    recorded = WandbFile(tmp_path / "one")
    (artifact,) = recorded.artifacts("task-set")
    assert artifact.use_after_commit
    assert SECRET not in str(artifact)
    files = {entry.path: json.loads(Path(entry.local_path).read_text()) for entry in artifact.manifest.contents}
    assert files == {"tasks.json": {"a": None, "b": "sha256:1"}, "origins.json": origins}
    assert recorded.config["inputs"] == [{"name": artifact.name, "digest": artifact.digest}]
    elsewhere = {"env": {**known["config"]["env"], "cache_dir": "/else"}}
    record(run_info(tmp_path / "two", **{**known, "config": elsewhere}))
    (same,) = WandbFile(tmp_path / "two").artifacts("task-set")
    assert (same.name, same.digest) == (artifact.name, artifact.digest)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"_target_": "x.TwentyQuestions", "objects": None}, "task-set-TwentyQuestions"),
        ({"_target_": "x.SweBench", "dataset": "verified"}, "task-set-verified"),
        ({"_target_": "x.Harbor", "dataset": None, "repo": "org/name@v1"}, "task-set-org-name-v1"),
        ({}, "task-set-tasks"),
    ],
)
def test_what_a_task_set_without_a_folder_is_called(env: dict[str, Any], name: str, tmp_path: Path) -> None:
    record(run_info(tmp_path, tasks=("t",), config={"env": env}))
    (artifact,) = WandbFile(tmp_path).artifacts("task-set")
    assert artifact.name == name


def test_a_branch_has_the_trajectories_of_its_parent_as_an_input(tmp_path: Path) -> None:
    parent, branch = tmp_path / "parent", tmp_path / "branch"
    write_results(parent)
    record(run_info(parent, run_id="theparent"))
    record(run_info(branch, parents=(parent, tmp_path / "not-tracked")))
    (produced,) = WandbFile(parent).artifacts("trajectories")
    (used,) = WandbFile(branch).artifacts("trajectories")
    assert (used.name, used.digest, used.use_after_commit) == (produced.name, produced.digest, True)
    assert WandbFile(branch).config["inputs"] == [{"name": "run-theparent-trajectories", "digest": produced.digest}]


@pytest.mark.parametrize(("limit", "expected"), [(1.0, {"store.json", "objects/ab/cd", "e1@1/snapshot.json"}),
                                                 (0.0, {"store.json"})])  # fmt: skip
def test_the_snapshot_store_is_an_artifact_up_to_a_size(tmp_path: Path, limit: float, expected: set[str]) -> None:
    store = tmp_path / "snapshots"
    for name in ("objects/ab/cd", "e1@1/snapshot.json", ".lock"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("content")
    tracker = WandbTracker(snapshots_limit_mb=limit)
    tracker.start(run_info(tmp_path))
    tracker.finish(RunSummary(1, (replace(RESULTS[0], snapshots=1),), snapshot_dir=store))
    (artifact,) = WandbFile(tmp_path).artifacts("snapshots")
    assert paths(artifact) == expected
    listing = next(entry.local_path for entry in artifact.manifest.contents if entry.path == "store.json")
    assert json.loads(Path(listing).read_text())["bytes_by_file"] == {"e1@1/snapshot.json": 7, "objects/ab/cd": 7}


def test_the_code_is_an_artifact_if_asked_for(tmp_path: Path) -> None:
    record(run_info(tmp_path), log_code=True)
    (artifact,) = WandbFile(tmp_path).artifacts("code")
    assert "ares_exp/rollout.py" in paths(artifact)
    assert not any(path.startswith("ares_exp/tasks/samples") for path in paths(artifact))


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    record(run_info(tmp_path), RESULTS)
    new = (episode(4, 1.0), episode(5, 1.0))
    record(run_info(tmp_path, resumed=True, earlier=RESULTS), new)
    first, second = WandbFile(tmp_path, 0), WandbFile(tmp_path, 1)
    assert (first.run.run_id, second.run.run_id) == ("run-1", "run-1")
    assert [row["progress/finished"] for row in second.rows] == [4, 5]
    assert second.rows[0]["progress/mean_reward"] == pytest.approx(2.5 / 3)
    steps = [row["_step"] for row in (*first.history, *second.history)]
    assert steps == sorted(set(steps))
    assert [row["episode_id"] for row in second.table] == ["e4", "e5"]
    logged = [artifact.client_id for artifact in first.artifacts("wandb-run-incremental-table")]
    kept = second.summary["episodes.previous_increments_paths"]
    assert [client_id in path for client_id, path in zip(logged, kept, strict=False)] == [True] * 3
    assert second.summary["run/tries"] == 5


def test_rows_that_a_killed_session_had_not_logged_come_into_the_table(tmp_path: Path) -> None:
    record(run_info(tmp_path), RESULTS[:1])
    record(run_info(tmp_path, resumed=True, earlier=RESULTS), (episode(4, 1.0),))
    second = WandbFile(tmp_path, 1)
    assert [row["episode_id"] for row in second.table] == ["e2", "e3", "e4"]
    assert [row["progress/finished"] for row in second.rows] == [4]


def test_a_resumed_run_that_was_not_tracked_before_is_tracked_now(tmp_path: Path) -> None:
    record(run_info(tmp_path, resumed=True, earlier=RESULTS), (episode(4, 1.0),))
    recorded = WandbFile(tmp_path)
    assert recorded.run.run_id == "run-1"
    assert len(recorded.table) == 4


def test_a_run_of_a_wandb_sweep_is_the_one_that_its_agent_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "wanted")
    record(run_info(tmp_path / "a"), mode="offline")
    assert WandbFile(tmp_path / "a").run.run_id == "wanted"
    assert WandbFile(tmp_path / "a").run.sweep_id == "sweep"
    record(run_info(tmp_path / "b", group="a Hydra sweep of its own"), mode="offline")
    assert WandbFile(tmp_path / "b").run.run_id == "run-1"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    monkeypatch.delenv("WANDB_RUN_ID")
    record(run_info(tmp_path / "a", resumed=True, earlier=RESULTS), ())
    assert WandbFile(tmp_path / "a", 1).run.run_id == "wanted"


def test_no_secret_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "tok<en>&\"very'secret"
    monkeypatch.setenv("MY_API_KEY", secret)
    tasks = tmp_path / "tasks"
    for name in ("leaky", "fine"):
        (tasks / name).mkdir(parents=True)
        (tasks / name / "task.toml").write_text(f"# {name}")
    (tasks / "leaky" / "instruction.md").write_text(f"use {secret}")
    run_dir = tmp_path / "run"
    tracker = WandbTracker()
    tracker.start(run_info(run_dir, config={"note": f"it is {secret}", "key": SECRET}, task_set=tasks,
                           tasks=("leaky", "fine")))  # fmt: skip
    error = ErrorInfo("PolicyError", f"refused {secret}")
    tracker.log_episode(
        replace(RESULTS[1], error=error), replace(chat("e2", f"say {secret}", outcome=Outcome.ERRORED), error=error)
    )
    tracker.finish(RunSummary(1, RESULTS[:1]))
    assert tracker.failures == 0
    recorded = WandbFile(run_dir)
    assert "say ***" in recorded.page(recorded.table[0]["trajectory"])
    assert {path.partition("/")[0] for path in paths(recorded.artifacts("task-set")[0])} >= {"fine"}
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    spellings = (secret, json.dumps(secret)[1:-1], "tok&lt;en&gt;", SECRET)
    assert [file for file in files if any(one.encode() in file.read_bytes() for one in spellings)] == []


def test_the_identity_of_a_stranger_is_checked(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    for text in ("", "[]", '{"id": "../x", "project": "p"}', '{"id": 3}', "{" * 100_000):
        (tmp_path / "wandb" / "run.json").write_text(text)
        assert read_identity(tmp_path) is None
