"""The exported folder for every way in which an attempt can end, and the metrics and names of an exported job."""

import json
import os
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ares_exp.commands.cli.run_command import run_command
from ares_exp.commands.harbor_export import mean_rewards, pass_rates, stable_id, trial_name
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.tasks.task_files import content_digest
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.trajectories.records import serialize_llm_response
from tests.unit.commands.harbor_export.recorded_run import CONFIG, SOLVED, TASKS, every_ending, failed, record, tried
from tests.unit.trajectories.atif_schema import validate_atif
from tests.unit.trajectories.chats import chat, with_step, write

HERE = Path(__file__).parent
SHAPES: dict[str, dict[str, str]] = json.loads((HERE / "harbor_shapes.json").read_text())
HARBOR_PYTHON = os.environ.get("ARES_EXP_HARBOR_PYTHON")


def export(run: Path, job: Path) -> int:
    return run_command("export", [str(run), str(job), "--to", "harbor"], "ares-exp export")


def exported(run: Path, out: Path, code: int = 0) -> Path:
    assert export(run, out / "job") == code
    return out / "job"


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def trials(job: Path) -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for path in job.glob("*/result.json"):
        result = read(path)
        context = result["agent_result"] or result["step_results"][0]["agent_result"]
        found[result["task_name"], context["metadata"]["ares_exp"]["attempt"]] = result
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    return exported(every_ending(folder / "run"), folder / "jobs")


def test_documents_match_the_harbor_schema(job: Path) -> None:
    result = read(job / "result.json")
    has_shape(result, "job/result.json")
    has_shape(result["stats"], "stats")
    for of_key in result["stats"]["evals"].values():
        has_shape(of_key, "evals")
    documents = [read(path) for path in job.glob("*/result.json")]
    assert len(documents) == 14
    for trial in documents:
        has_shape(trial, "trial/result.json")
        assert set(trial["config"]) < set(SHAPES["config"]), "the others are at Harbor's default"
        has_shape(trial["agent_info"], "agent_info")
        has_shape(trial["agent_info"]["model_info"], "model_info")
        for name in ("environment_setup", "agent_execution", "verifier"):
            has_shape(trial[name], "timing")
        for part in (trial, *(trial["step_results"] or ())):
            for name in ("agent_result", "verifier_result", "exception_info"):
                has_shape(part[name], name)
        for step in trial["step_results"] or ():
            has_shape(step, "step_result")


def has_shape(document: dict[str, Any] | None, name: str) -> None:
    if document is None:
        return
    shape = SHAPES[name]
    assert set(document) == set(shape), name
    kinds = {"str": str, "int": int, "float": (int, float), "dict": dict, "list": list, "bool": bool}
    for key, kind in shape.items():
        value = document[key]
        assert isinstance(value, kinds[kind.rstrip("?")]) or (kind.endswith("?") and value is None), (name, key, value)


def test_outcomes_become_exceptions(job: Path) -> None:
    first, second = TASKS
    found = trials(job)
    errors = {
        slot: (one["exception_info"] or {}).get("exception_type") for slot, one in found.items() if slot[0] == first
    }
    assert errors == {
        (first, 0): None,
        (first, 1): None,
        (first, 2): "AgentTimeoutError",
        (first, 3): None,
        (first, 4): "RewardFileNotFoundError",
        (first, 5): None,
        (first, 6): None,
        (first, 7): "CancelledError",
        (first, 8): "CancelledError",
        (first, 9): "RateLimitError",
        (first, 10): None,
        (first, 11): "ContainerDiedError",
    }, "a retry that is running has no trial yet"
    rewards = {slot: (one["verifier_result"] or {}).get("rewards") for slot, one in found.items()}
    assert rewards[first, 2] == {"reward": 0.5}, "a reward stands beside the time limit"
    assert rewards[first, 3] is None
    assert rewards[first, 4] is None
    assert rewards[second, 1] == {"reward": 1.0, "style": 0.25}
    assert found[first, 3]["agent_result"]["metadata"]["ares_exp"]["truncated_by"] == "steps"
    assert "BudgetExhaustedError" in found[first, 7]["exception_info"]["exception_message"]
    assert found[first, 9]["started_at"] is None
    named = job / found[first, 4]["trial_name"] / "exception.txt"
    assert named.read_text() == "RewardFileNotFoundError: the message of RewardFileNotFoundError\n"
    assert not (job / found[first, 0]["trial_name"] / "exception.txt").exists()


def test_trial_is_complete(job: Path) -> None:
    trial = trials(job)[TASKS[0], 0]
    folder = job / trial["trial_name"]
    assert re.fullmatch("write-greeting__[0-9a-f]{7}", folder.name)
    assert trial["trial_uri"] == folder.resolve().as_uri()
    assert trial["task_id"] == {"path": str(SAMPLES / TASKS[0])}
    assert (trial["task_name"], trial["source"]) == ("write-greeting", "samples")
    assert trial["agent_info"] == {
        "name": "ShellAgent",
        "version": "0.1.0",
        "model_info": {"name": "tiny", "provider": "local"},
    }
    assert (trial["started_at"], trial["finished_at"]) == ("2026-01-05T09:00:00Z", "2026-01-05T09:00:06Z")
    usage = {name: trial["agent_result"][name] for name in ("n_input_tokens", "n_output_tokens", "cost_usd")}
    assert usage == {"n_input_tokens": 300, "n_output_tokens": 30, "cost_usd": 0.75}
    trajectory = read(folder / "agent" / "trajectory.json")
    validate_atif(trajectory)
    assert trajectory["trajectory_id"] == SOLVED
    assert (folder / "verifier" / "test-stdout.txt").read_text() == "ok\n"
    assert (folder / "artifacts" / "manifest.json").read_text() == "[]"
    assert trial["task_checksum"] == content_digest(LinkBounds(SAMPLES / TASKS[0])).removeprefix("sha256:")
    assert (job / "job.log").read_text().count("\n") == 16
    config = read(folder / "config.json")
    assert config == trial["config"]
    assert config == {
        "task": {"path": str(SAMPLES / TASKS[0]), "source": "samples"},
        "trial_name": folder.name,
        "trials_dir": str(job.resolve()),
        "environment": {"type": "docker"},
        "agent": {"name": "ShellAgent", "model_name": "local/tiny"},
        "job_id": read(job / "result.json")["id"],
    }


def test_job_is_complete(job: Path) -> None:
    config, result = (read(job / f"{name}.json") for name in ("config", "result"))
    assert (config["job_name"], config["jobs_dir"]) == ("job", str(job.parent.resolve()))
    assert config["n_attempts"] == 12
    assert [task["path"] for task in config["tasks"]] == [str(SAMPLES / name) for name in TASKS]
    assert datetime.fromisoformat(result["started_at"]).tzinfo is None, "local time"
    assert datetime.fromisoformat(result["started_at"]).timestamp() == 1767603600.0
    assert result["finished_at"] is None, "something is owed"
    assert result["n_total_trials"] == 24
    stats = result["stats"]
    assert {key: value for key, value in stats.items() if key != "evals"} == {
        "n_completed_trials": 14,
        "n_errored_trials": 6,
        "n_running_trials": 0,
        "n_pending_trials": 10,
        "n_cancelled_trials": 2,
        "n_retries": 1,
        "n_input_tokens": 14 * 300,
        "n_cache_tokens": None,
        "n_output_tokens": 14 * 30,
        "cost_usd": 14 * 0.75,
    }
    [(key, evals)] = stats["evals"].items()
    assert key == "ShellAgent__tiny__samples"
    assert (evals["n_trials"], evals["n_errors"]) == (8, 6)
    assert evals["pass_at_k"] == {}, "not every reward is 0 or 1"
    assert len(evals["reward_stats"]["reward"]["1.0"]) == 5
    assert len(evals["exception_stats"]["CancelledError"]) == 2
    [metrics] = evals["metrics"]
    assert metrics == {"reward": pytest.approx(6 / 14), "style": pytest.approx(0.25 / 14)}


def test_steps_have_separate_directories(job: Path) -> None:
    trial = trials(job)[TASKS[0], 10]
    folder = job / trial["trial_name"]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["agent", "steps"]
    assert trial["agent_result"]["n_input_tokens"] == 300, "all that the episode used"
    validate_atif(read(folder / "agent" / "trajectory.json"))
    one, two = trial["step_results"]
    assert (one["step_name"], one["exception_info"]) == ("one", None)
    assert (two["step_name"], two["exception_info"]["exception_type"]) == ("two", "AgentTimeoutError")
    assert [step["verifier_result"]["rewards"]["reward"] for step in (one, two)] == [1.0, 0.0]
    for name in ("one", "two"):
        assert (folder / "steps" / name / "agent").is_dir()
        assert (folder / "steps" / name / "verifier" / "test-stdout.txt").read_text() == "ok\n"


def test_token_ids_of_every_turn_are_exported(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    episode = chat(SOLVED, TASKS[0], length=3)
    run = record(tmp_path / "run", [tried()])
    for number in (1, 2):
        response = serialize_llm_response(LLMResponse.from_text("ok", **ids))
        episode = with_step(episode, number, action=response)
    write(run / "trajectories" / f"{SOLVED}.json", episode)
    [trial] = trials(exported(run, tmp_path)).values()
    assert trial["agent_result"]["rollout_details"] == [{name: [value] * 2 for name, value in ids.items()}]


def test_git_tasks_keep_their_origin_and_checksum(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [tried()], tasks=TASKS[:1], config={"env": {**CONFIG["env"], "repo": "org/name"}})
    origin = {"git_url": "https://host/org/name.git", "git_commit": "c" * 40, "path": f"tasks/{TASKS[0]}"}
    executed = {"task_origins": {TASKS[0]: origin}, "tasks": {TASKS[0]: f"sha256:{'0' * 64}"}}
    provenance = {**read(run / "provenance.json"), **executed}
    (run / "provenance.json").write_text(json.dumps(provenance))
    job = exported(run, tmp_path)
    [trial] = [read(path) for path in job.glob("*/result.json")]
    place = {"git_url": origin["git_url"], "git_commit_id": origin["git_commit"], "path": origin["path"]}
    assert (trial["task_id"], trial["task_checksum"]) == (place, "0" * 64)
    assert trial["source"] == f"host/org/name/tree/{origin['git_commit']}/tasks"
    assert read(job / "config.json")["tasks"] == [{**place, "source": trial["source"]}]


def test_export_is_deterministic(tmp_path: Path) -> None:
    run = every_ending(tmp_path / "run")
    first = exported(run, tmp_path / "jobs")
    files = {path.relative_to(first): path.read_bytes() for path in first.rglob("*") if path.is_file()}
    first.rename(tmp_path / "before")
    again = exported(run, tmp_path / "jobs")
    assert {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()} == files


def test_finished_run_has_pass_rates(tmp_path: Path) -> None:
    results = [tried(attempt=0), tried(attempt=1, reward=0.0), tried(TASKS[1], 0), tried(TASKS[1], 1)]
    result = read(exported(record(tmp_path / "run", results, attempts=2), tmp_path) / "result.json")
    assert result["finished_at"] == result["updated_at"]
    [evals] = result["stats"]["evals"].values()
    assert (evals["metrics"], evals["pass_at_k"]) == ([{"mean": 0.75}], {"2": 1.0})
    assert evals["exception_stats"] == {}


def test_environment_without_containers_is_exported(tmp_path: Path) -> None:
    config = {"env": {"_target_": "somewhere.Riddles"}, "policy": {"_target_": "ares_exp.policies.oracle.OraclePolicy"}}
    result = tried("a riddle/with slashes", container_image=None, phase_sec={}, rewards={})
    run = record(tmp_path / "run", [result], tasks=["a riddle/with slashes"], trajectories=False, config=config)
    job = exported(run, tmp_path)
    [trial] = [read(path) for path in job.glob("*/result.json")]
    assert trial["trial_name"].startswith("with-slashes__")
    assert trial["task_id"] == {"path": "a riddle/with slashes"}
    assert (trial["source"], trial["verifier_result"]) == ("Riddles", {"rewards": {"reward": 1.0}})
    assert trial["config"]["environment"]["import_path"] == "somewhere:Riddles"
    assert trial["agent_info"]["model_info"] == {"name": "oracle", "provider": None}
    assert trial["task_checksum"] == "", "nobody knows the digest of the task"
    assert not list(job.rglob("trajectory.json"))


def test_secrets_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-very-secret-0123456789"
    run = record(tmp_path / "run", [failed(Outcome.AGENT_ERROR, secret)], config={"agent": {"password": secret}})
    (run / "files" / SOLVED / "artifacts" / "leak").write_bytes(b"\xff" + secret.encode())
    monkeypatch.setenv("MY_API_KEY", secret)
    job = exported(run, tmp_path)
    assert (next(job.rglob("leak"))).read_bytes() == b"\xff***"
    assert not [path for path in job.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_files_outside_the_run_are_not_exported(tmp_path: Path) -> None:
    """A run directory may come from anybody."""
    run = record(tmp_path / "run", [tried(), tried(attempt=1)], attempts=2, tasks=TASKS[:1])
    (tmp_path / "mine" / "verifier").mkdir(parents=True)
    (tmp_path / "mine" / "verifier" / "mine").write_text("mine")
    files = run / "files" / SOLVED
    (files / "artifacts" / "folder").symlink_to(tmp_path / "mine")
    (files / "verifier" / "file").symlink_to(tmp_path / "mine" / "verifier" / "mine")
    os.mkfifo(files / "verifier" / "pipe")
    (files / "config.json").write_text("{}")
    (run / "run.log").unlink()
    (run / "run.log").symlink_to(tmp_path / "mine" / "verifier" / "mine")
    rows = (run / "episodes.jsonl").read_text().splitlines()
    (run / "episodes.jsonl").write_text(f"{rows[0]}\n{rows[1].replace(SOLVED[:-8].replace('0', '1'), '../../mine/')}\n")
    rows[1] = json.dumps({**json.loads(rows[1]), "episode_id": "../../mine"})
    (run / "episodes.jsonl").write_text("\n".join(rows) + "\n")
    job = exported(run, tmp_path)
    assert len(list(job.glob("*/result.json"))) == 2
    assert not list(job.rglob("mine"))
    assert not (job / "job.log").exists()
    assert [path.name for path in sorted((job / trials(job)[TASKS[0], 0]["trial_name"]).rglob("*")) if "v" in path.name]
    assert sorted(path.name for path in job.rglob("verifier/*")) == ["test-stdout.txt"]


def refused(run: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(run.parent.rglob("*"))
    assert export(run, job) == 2
    assert sorted(run.parent.rglob("*")) == before, "nothing is left of it"
    return capsys.readouterr().err


def test_impossible_exports_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, jobs = record(tmp_path / "run", [tried()]), tmp_path / "jobs"
    (jobs / "run").mkdir(parents=True)
    assert f"{jobs / 'run'} already exists" in refused(run, jobs / "run", capsys)
    assert "is not a run directory" in refused(jobs, jobs / "job", capsys)
    for name in (".hidden", "a job"):
        assert "letters, digits and `._-`" in refused(run, jobs / name, capsys)
    without_results = record(tmp_path / "started", [])
    assert "No attempt has a result yet." in refused(without_results, jobs / "job", capsys)
    (tmp_path / "file").write_text("")
    assert "Cannot write" in refused(run, tmp_path / "file" / "job", capsys)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "[]"),
        ("config.yaml", "{"),
        ("provenance.json", "[]"),
        ("summary.json", "{"),
        ("episodes.jsonl", "{}\n"),
        ("episodes.jsonl", json.dumps(tried().to_dict() | {"stages": [{"name": "../up", "reward": 1.0}]}) + "\n"),
    ],
)
def test_broken_records_are_named(tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", [tried()])
    (run / name).write_text(text)
    assert name in refused(run, tmp_path / "job", capsys)


def test_missing_records_are_tolerated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed runs and merged ones lack some records; a broken trajectory is told."""
    run = record(tmp_path / "run", [tried()], tasks=TASKS[:1])
    for name in ("provenance.json", "sessions.jsonl", "summary.json", "run.log"):
        (run / name).unlink()
    (run / "trajectories" / f"{SOLVED}.json").write_text("{")
    job = exported(run, tmp_path, code=1)
    assert read(job / "result.json")["n_total_trials"] == 1
    assert f"{SOLVED}.json" in capsys.readouterr().err
    (job / "config.json").unlink()
    (run / "config.yaml").unlink()
    assert "The export needs this file" in refused(run, tmp_path / "other", capsys)


@pytest.mark.skipif(HARBOR_PYTHON is None, reason="ARES_EXP_HARBOR_PYTHON names no Python that has Harbor")
def test_harbor_reads_the_export(job: Path) -> None:
    assert HARBOR_PYTHON is not None
    command = [HARBOR_PYTHON, "-W", "ignore", str(HERE / "harbor_check.py"), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "14 trials, 14 with a result\n"


def test_mean_of_one_key_is_called_mean() -> None:
    assert mean_rewards([{"reward": 1.0}, None, {}]) == {"mean": pytest.approx(1 / 3)}
    assert mean_rewards([{"accuracy": 1.0}]) == {"mean": 1.0}
    assert mean_rewards([None]) == {"mean": 0.0}
    assert mean_rewards([{"a": 1.0, "b": 2.0}, {"b": 4.0}, None]) == {"a": pytest.approx(1 / 3), "b": 2.0}


@pytest.mark.parametrize(
    ("passed", "attempts", "expected"),
    [
        (1, 1, {}),
        (1, 2, {"2": 1.0}),
        (0, 3, {"2": 0.0}),
        (1, 4, {"2": 0.5, "4": 1.0}),
        (1, 11, {"2": 2 / 11, "4": 4 / 11, "5": 5 / 11, "8": 8 / 11, "10": 10 / 11}),
    ],
)
def test_pass_rates_are_computed_per_k(passed: int, attempts: int, expected: dict[str, float]) -> None:
    assert pass_rates({}) == {}
    each = [number < passed for number in range(attempts)]
    assert pass_rates({"a": each}) == pytest.approx(expected)
    assert pass_rates({"a": each, "b": [False] * (attempts + 1)}) == pytest.approx(
        {k: value / 2 for k, value in expected.items()}
    )


def test_trial_names_are_short_and_unique() -> None:
    assert trial_name("org/a" * 10, "x") != trial_name("org/a" * 10, "y")
    head, _, drawn = trial_name("some/long-name-of-a-task-that-is-cut__-here", "x").rpartition("__")
    assert (head, len(drawn)) == ("long-name-of-a-task-that-is-cut", 7)
    assert trial_name("..", "x").startswith("task__")
    assert trial_name("ä b", "\udc80").startswith("--b__")


def test_ids_are_stable() -> None:
    assert stable_id("run") == stable_id("run") != stable_id("run", "episode")
