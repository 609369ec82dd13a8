"""A run directory with one attempt for each way in which one can end, as tests of the export want it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome, RunSummary, StageResult
from ares_exp.tasks.task_files import content_digest
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.trajectories.response_log import LoggedEpisode
from tests.unit.runs.resume.logs import log_in
from tests.unit.trajectories.chats import chat, write

START = 1767603600.0
TASKS = ("write-greeting", "count-records")
SOLVED, TWO_KEYS = "write-greeting__0__00000000", "count-records__1__00000000"
LIMIT = ErrorInfo.of_limit("time")
CONFIG: Mapping[str, Any] = {
    "env": {"_target_": "ares_exp.environments.harbor.HarborEnvironments", "path": None},
    "agent": {"_target_": "ares_exp.agents.shell_agent.ShellAgentFactory", "command_timeout_sec": 120},
    "container": {"_target_": "ares_exp.containers.docker.DockerContainerFactory"},
    "policy": {
        "_target_": "ares_exp.policies.chat_completions.OpenAIPolicy",
        "model": "local/tiny",
        "base_url": "http://127.0.0.1:1/v1",
        "api_key_env": "TINY_API_KEY",
        "temperature": None,
    },
    "retry": {"_target_": "ares_exp.runs.retries.RetryRules", "verifier_error": 2, "errors": {"RateLimitError": 5}},
    "attempts": 1,
    "concurrency": 8,
    "limits": {"steps": 250, "cost": None},
    "timeouts": {"multiplier": 2.0, "agent": 30.0, "verifier": None},
}


def tried(
    task: str = TASKS[0],
    attempt: int = 0,
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    *,
    retry: int = 0,
    **more: Any,
) -> EpisodeResult:
    """One try."""
    rewards = {"reward": reward} if reward is not None else {}
    start = START + 10 * attempt + retry
    fields: dict[str, Any] = {
        "rewards": rewards,
        "num_steps": 3,
        "prompt_tokens": 300,
        "generated_tokens": 30,
        "cost": 0.75,
        "started_at": start,
        "finished_at": start + 6,
        "phase_sec": {"start": 1.0, "agent": 2.0, "policy": 1.5, "verify": 0.5},
        "container_image": "tiny:1",
    }
    episode_id = f"{task}__{attempt}__{retry:08x}"
    return EpisodeResult(episode_id, task, attempt, 7, outcome, reward, retry=retry, **{**fields, **more})


def failed(kind: Outcome, error: str, **more: Any) -> EpisodeResult:
    """A try without a reward."""
    return tried(reward=None, outcome=kind, error=ErrorInfo(error, f"the message of {error}"), rewards={}, **more)


def record(
    folder: Path,
    results: Sequence[EpisodeResult],
    *,
    attempts: int = 1,
    tasks: Sequence[str] = TASKS,
    trajectories: bool = True,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the directory."""
    digests = {
        name: content_digest(LinkBounds(SAMPLES / name)) if (SAMPLES / name).is_dir() else None for name in tasks
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "attempts": attempts, **(config or {})}))
    provenance = {"run_id": "abcd1234", "ares_exp_version": "0.1.0", "cwd": str(folder), "tasks": digests}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    sessions = [{"started": START - 1, "attempts": attempts}, {"ended": START + 100, "interrupted": False}]
    (folder / "sessions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in sessions))
    (folder / "episodes.jsonl").write_text("".join(f"{json.dumps(one.to_dict())}\n" for one in results))
    (folder / "run.log").write_text("".join(f"INFO {one.episode_id}: {one.outcome}\n" for one in results))
    summary = RunSummary(len(tasks) * attempts, tuple(results))
    (folder / "summary.json").write_text(json.dumps(summary.to_dict()))
    for one in results:
        if trajectories:
            length = sum(stage.num_steps for stage in one.stages) + 1 if one.stages else one.num_steps + 1
            episode = chat(one.episode_id, one.task_name, length=length, reward=one.reward, start=one.started_at)
            write(folder / "trajectories" / f"{one.episode_id}.json", episode)
        for name in [f"steps/{stage.name}/" for stage in one.stages] or [""]:
            for path, text in ((f"{name}verifier/test-stdout.txt", "ok\n"), (f"{name}artifacts/manifest.json", "[]")):
                place = folder / "files" / one.episode_id / path
                place.parent.mkdir(parents=True)
                place.write_text(text)
    return folder


def every_ending(folder: Path) -> Path:
    """Twelve attempts at the first task, two at the second; one is running, and three have not started."""
    steps = ErrorInfo.of_limit("steps")
    stages = (StageResult("one", 1.0, {"reward": 1.0}, None, 2), StageResult("two", 0.0, {"reward": 0.0}, "time", 1))
    ends = [
        tried(),
        tried(reward=0.0, attempt=1),
        tried(reward=0.5, attempt=2, outcome=Outcome.TRUNCATED, error=LIMIT),
        tried(reward=None, attempt=3, outcome=Outcome.TRUNCATED, error=steps),
        failed(Outcome.VERIFIER_ERROR, "RewardFileNotFoundError", attempt=4),
        failed(Outcome.CONTAINER_ERROR, "ContainerDiedError", attempt=5),
        tried(attempt=5, retry=1),
        failed(Outcome.CANCELLED, "CancelledError", attempt=6),
        tried(attempt=6, retry=1),
        failed(Outcome.CANCELLED, "BudgetExhaustedError", attempt=7),
        failed(Outcome.LOST, "lost", attempt=8),
        failed(Outcome.POLICY_ERROR, "RateLimitError", attempt=9, started_at=0.0, finished_at=0.0, phase_sec={}),
        tried(reward=0.5, attempt=10, outcome=Outcome.TRUNCATED, error=LIMIT, stages=stages),
        failed(Outcome.CONTAINER_ERROR, "ContainerDiedError", attempt=11),
        tried(TASKS[1]),
        tried(TASKS[1], 1, rewards={"reward": 1.0, "style": 0.25}),
    ]
    record(folder, ends, attempts=12)
    in_progress = LoggedEpisode(f"{TASKS[0]}__11__00000001", TASKS[0], 11, 1, 7, START + 200)
    log_in(folder / "responses", in_progress).start(())
    return folder
