"""What a W&B run holds: as a service gets it."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome, RunSummary
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_tracker import WandbTracker
from tests.unit.trackers.tracked_run import RESULTS, SECRET, episode, patient_tracker, run_info
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS, ServedArtifact, ServedRun, WandbService
from tests.unit.trajectories.chats import chat

pytestmark = LEAVES_FOLDERS


def record(info: RunInfo, results: Sequence[EpisodeResult] = RESULTS, **settings: object) -> WandbTracker:
    """Records a whole session; the summary is over earlier sessions, too."""
    tracker = patient_tracker(**settings)
    tracker.start(info)
    for result in results:
        tracker.log_episode(result, chat(result.episode_id, result.task_name))
    everything = (*info.earlier, *results)
    tracker.finish(RunSummary(len(everything), everything, wall_sec=4.0))
    return tracker


def paths(artifact: ServedArtifact) -> set[str]:
    return set(artifact.manifest)


def test_config_names_and_totals(service: WandbService, tmp_path: Path) -> None:
    config = {**run_info(tmp_path).config, "objective": "scored_only/mean_reward"}
    info = run_info(tmp_path, config=config, group="a sweep", job_type="evaluation", tags=("one",))
    assert record(info, project="a-project", tags=("two", "one")).failures == 0
    recorded = ServedRun(service)
    assert (recorded.first["name"], recorded.first["project"]) == ("run-1", "a-project")
    assert (recorded.first["groupName"], recorded.first["jobType"]) == ("a sweep", "evaluation")
    assert (recorded.first["displayName"], sorted(recorded.first["tags"])) == ("a name", ["one", "two"])
    assert recorded.config["seed"] == 3
    policy = {"api_key": "***", "api_key_env": "OPENAI_API_KEY", "model": "a-model"}
    assert recorded.config["policy"] == policy
    assert recorded.config["provenance"] == {"argv": ["ares_exp", "seed=3"], "choices": {"env": "harbor"}}
    shown = [recorded.config[name] for name in ("choices", "command", "model")]
    assert shown == [{"env": "harbor"}, "ares_exp seed=3", "a-model"]
    assert (recorded.summary["run/planned"], recorded.summary["run/scored"]) == (3, 2)
    assert recorded.summary["run/outcomes/agent_error"] == 1
    assert recorded.summary["run/mean_reward"] == 0.75
    assert recorded.summary["stat/mean_reward"] == 0.5  # there, the error counts as zero
    assert recorded.summary["stat/scored_only/mean_reward"] == 0.75
    assert recorded.summary["objective"] == 0.75
    for name, count in (("reward", 2), ("num_steps", 3), ("duration_sec", 3), ("generated_tokens", 3)):
        assert recorded.summary[f"attempts/{name}"]["_type"] == "histogram"
        assert sum(recorded.summary[f"attempts/{name}"]["values"]) == count
    assert recorded.exit_codes == [1]


def test_orders_and_samples_have_their_axes(service: WandbService, tmp_path: Path) -> None:
    order = {"id": "a1", "verb": "pause", "by": "me", "reason": "lunch", "outcome": "done"}
    tracker = patient_tracker()
    tracker.start(run_info(tmp_path))
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.log_order(order)
    tracker.log_order({"verb": None, "outcome": "refused", "says": "garbage"})
    tracker.log_system({"system/loop_lag_sec": 0.25, "system/containers": 3})
    tracker.finish(RunSummary(3, RESULTS))
    assert tracker.failures == 0
    recorded = ServedRun(service)
    assert len(recorded.rows) == 3
    assert {key: value for key, value in recorded.config.items() if key.startswith("control")} == {"control/a1": order}
    (row,) = [row for row in recorded.history if "system/loop_lag_sec" in row]
    assert (row["system/loop_lag_sec"], row["system/containers"]) == (0.25, 3)
    assert row["progress/wall_sec"] >= 0
    assert "progress/finished" not in row


AGAIN: dict[str, Any] = {
    "episode_id": "e2-again", "retry": 1, "reward": 1.0, "outcome": Outcome.COMPLETED, "error": None
}  # fmt: skip


def test_tries_are_rows_by_number_and_time(service: WandbService, tmp_path: Path) -> None:
    started = time.time()
    results = [replace(one, started_at=started, finished_at=started + 100 + n) for n, one in enumerate(RESULTS)]
    record(run_info(tmp_path), (*results, replace(results[1], **AGAIN)))
    recorded = ServedRun(service)
    first, second, third, last = recorded.rows
    assert (first["episode/reward"], first["episode/num_steps"]) == (1.0, 1)
    assert first["episode/duration_sec"] == pytest.approx(100)
    assert (first["episode/prompt_tokens"], first["episode/generated_tokens"], first["episode/cost"]) == (100, 10, 0.25)
    assert "episode/reward" not in second
    assert "progress/mean_reward" not in second
    assert (third["outcome/completed"], third["outcome/agent_error"]) == (2, 1)
    assert (third["progress/finished"], third["progress/mean_reward"]) == (3, 0.75)
    assert (last["progress/finished"], last["outcome/completed"], last["outcome/agent_error"]) == (4, 3, 0)
    assert last["progress/mean_reward"] == pytest.approx(2.5 / 3), "an attempt counts by its last try"
    wall = [row["progress/wall_sec"] for row in recorded.rows]
    assert wall[0] == pytest.approx(100, abs=1)
    assert [later - wall[0] for later in wall] == pytest.approx([0, 1, 2, 1])
    for key in ("episode/*", "outcome/*", "progress/mean_reward"):
        assert recorded.step_metrics[key] == "progress/finished"
    for key in ("system/*", "progress/finished"):
        assert recorded.step_metrics[key] == "progress/wall_sec"


def test_table_contains_every_try_once(service: WandbService, tmp_path: Path) -> None:
    record(run_info(tmp_path))
    recorded = ServedRun(service)
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3"]
    row = recorded.table[1]
    assert (row["task"], row["attempt"], row["retry"], row["reward"]) == ("task2", 0, 0, None)
    assert (row["outcome"], row["error"], row["num_steps"]) == ("agent_error", "AgentError: boom", 2)
    assert (row["prompt_tokens"], row["generated_tokens"], row["cost"], row["duration_sec"]) == (100, 10, 0.25, 2.5)
    page = recorded.page(row["trajectory"])
    episodes = json.loads(page)
    assert episodes["e2"]["messages"][0]["text"] == "Please do task2."
    assert episodes["e2"]["steps"][2]["commands"][0]["command"] == "run 2"


@pytest.mark.nightly
def test_tasks_without_folder_have_digests_and_origins(service: WandbService, tmp_path: Path) -> None:
    origins = {"b": {"git_url": "https://example.org/t", "git_commit": "1" * 40, "path": "tasks/b"}}
    known = {
        "tasks": ("b", "a"),
        "task_digests": {"a": None, "b": "sha256:1"},
        "config": {"env": {"_target_": "pkg.Tasks", "repo": f"https://u:{SECRET}@example.org/t", "api_key": SECRET}},
        "provenance": {"task_origins": origins},
    }
    record(run_info(tmp_path / "one", **known))
    recorded = ServedRun(service)
    (artifact,) = recorded.artifacts("task-set")
    assert artifact.used_by == ["run-1"]
    assert SECRET not in str(artifact)
    files = {name: json.loads(artifact.files[name]) for name in paths(artifact)}
    assert files == {"tasks.json": {"a": None, "b": "sha256:1"}, "origins.json": origins}
    assert recorded.config["inputs"] == [{"name": artifact.name, "digest": artifact.digest}]
    elsewhere = {"env": {**known["config"]["env"], "cache_dir": "/else"}}
    record(run_info(tmp_path / "two", **{**known, "config": elsewhere, "run_id": "run-2"}))
    assert ServedRun(service, "run-2").artifacts("task-set") == [artifact]


@pytest.mark.parametrize(
    ("env", "task_set", "name"),
    [
        ({"_target_": "x.Harbor", "dataset": None, "repo": "org/name@v1"}, None, "task-set-org-name-v1"),
        pytest.param({"_target_": "x.TwentyQuestions"}, None, "task-set-TwentyQuestions", marks=pytest.mark.nightly),
        pytest.param({}, SAMPLES, "task-set-samples", marks=pytest.mark.nightly),
    ],
)
def test_large_task_set_has_only_digests(
    env: dict[str, Any], task_set: Path | None, name: str, service: WandbService, tmp_path: Path
) -> None:
    tasks = {"tasks": ("write-greeting",), "task_digests": {"write-greeting": "sha256:1"}}
    record(run_info(tmp_path, task_set=task_set, config={"env": env}, **tasks), task_set_limit_mb=0)
    (artifact,) = ServedRun(service).artifacts("task-set")
    assert (artifact.name, paths(artifact)) == (name, {"tasks.json"})
    assert json.loads(artifact.files["tasks.json"]) == tasks["task_digests"]


@pytest.mark.parametrize(("limit", "expected"), [(1.0, {"store.json", "objects/ab/cd", "e1@1/snapshot.json"}),
                                                 (0.0, {"store.json"})])  # fmt: skip
def test_small_snapshot_store_is_an_artifact(
    service: WandbService, tmp_path: Path, limit: float, expected: set[str]
) -> None:
    store = tmp_path / "snapshots"
    for name in ("objects/ab/cd", "e1@1/snapshot.json", ".lock"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("content")
    tracker = patient_tracker(snapshots_limit_mb=limit)
    tracker.start(run_info(tmp_path))
    tracker.finish(RunSummary(1, (replace(RESULTS[0], snapshots=1),), snapshot_dir=store))
    (artifact,) = ServedRun(service).artifacts("snapshots")
    assert paths(artifact) == expected
    listing = json.loads(artifact.files["store.json"])
    assert (listing["path"], listing["snapshots"]) == ("snapshots", 1)
    assert listing["bytes_by_file"] == {"e1@1/snapshot.json": 7, "objects/ab/cd": 7}


@pytest.mark.parametrize("logged", [3, 1, 0], ids=["resumed", "killed", "not tracked"])
def test_resumed_run_has_rows_of_all_sessions(service: WandbService, tmp_path: Path, logged: int) -> None:
    if logged:
        record(run_info(tmp_path), RESULTS[:logged])
    record(run_info(tmp_path, resumed=True, earlier=RESULTS), (episode(4, 1.0), episode(5, 1.0)))
    assert list(service.runs) == ["run-1"]
    recorded = ServedRun(service)
    assert [row["progress/finished"] for row in recorded.rows] == [*range(1, 1 + logged), 4, 5]
    assert recorded.rows[logged]["progress/mean_reward"] == pytest.approx(2.5 / 3)
    steps = [row["_step"] for row in recorded.history]
    assert steps == sorted(set(steps))
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3", "e4", "e5"]
    if logged:
        assert "Please do task1." in recorded.page(recorded.table[0]["trajectory"])
    assert recorded.summary["run/tries"] == 5


@pytest.mark.nightly
def test_wandb_sweep_run_uses_the_agent_id(
    service: WandbService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "wanted")
    record(run_info(tmp_path / "a"))
    assert [(name, made[0]["sweep"]) for name, made in service.runs.items()] == [("wanted", "sweep")]
    record(run_info(tmp_path / "b", group="a Hydra sweep of its own"))
    assert list(service.runs) == ["wanted", "run-1"]
    monkeypatch.delenv("WANDB_SWEEP_ID")
    monkeypatch.delenv("WANDB_RUN_ID")
    record(run_info(tmp_path / "a", resumed=True, earlier=RESULTS), (episode(4, 1.0),))
    assert list(service.runs) == ["wanted", "run-1"]
    assert [row["progress/finished"] for row in ServedRun(service, "wanted").rows] == [1, 2, 3, 4]


def test_secrets_are_not_recorded(service: WandbService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "tok<en>&\"very'secret"
    monkeypatch.setenv("MY_API_KEY", secret)
    tasks = tmp_path / "tasks"
    for name in ("leaky", "fine"):
        (tasks / name).mkdir(parents=True)
        (tasks / name / "task.toml").write_text(f"# {name}")
    (tasks / "leaky" / "instruction.md").write_text(f"use {secret}")
    (tasks / "linked").symlink_to(tasks / "fine")
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    tracker = patient_tracker()
    tracker.start(run_info(run_dir, config={"note": f"it is {secret}", "key": SECRET}, task_set=Path("tasks"),
                           tasks=("leaky", "fine", "linked")))  # fmt: skip
    error = ErrorInfo("PolicyError", f"refused {secret}")
    tracker.log_episode(
        replace(RESULTS[1], error=error), replace(chat("e2", f"say {secret}", outcome=Outcome.ERRORED), error=error)
    )
    tracker.finish(RunSummary(1, RESULTS[:1]))
    assert tracker.failures == 0
    recorded = ServedRun(service)
    assert "say ***" in recorded.page(recorded.table[0]["trajectory"])
    assert {path.partition("/")[0] for path in paths(recorded.artifacts("task-set")[0])} >= {"fine", "linked"}
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    spellings = (secret, json.dumps(secret)[1:-1], "tok&lt;en&gt;", SECRET)
    assert [file for file in files if any(one.encode() in file.read_bytes() for one in spellings)] == []
    assert [one for one in service.everything if any(spelling.encode() in one for spelling in spellings)] == []
