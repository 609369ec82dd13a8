"""A small run for trackers to record."""

from pathlib import Path
from typing import Any

from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_tracker import WandbTracker

SECRET = "0123456789abcdef0123456789abcdef01234567"


def patient_tracker(**settings: Any) -> WandbTracker:
    """A W&B tracker that waits long enough for a machine that is busy with other tests."""
    return WandbTracker(**{"init_timeout_sec": 60.0, "finish_timeout_sec": 100.0, **settings})


def episode(index: int, reward: float | None, outcome: Outcome = Outcome.COMPLETED, **more: Any) -> EpisodeResult:
    return EpisodeResult(
        episode_id=f"e{index}",
        task_name=f"task{index}",
        attempt=0,
        seed=0,
        outcome=outcome,
        reward=reward,
        error=ErrorInfo("AgentError", "boom") if reward is None else None,
        num_steps=index,
        prompt_tokens=100,
        generated_tokens=10,
        cost=0.25,
        started_at=10.0,
        finished_at=12.5,
        **more,
    )


def write_results(run_dir: Path) -> None:
    """The files of a run that become its artifact of trajectories."""
    (run_dir / "trajectories").mkdir(parents=True)
    (run_dir / "episodes.jsonl").write_text("{}\n")
    (run_dir / "trajectories" / "e1.json").write_text("{}")


RESULTS = (episode(1, 1.0), episode(2, None, Outcome.AGENT_ERROR), episode(3, 0.5))


def run_info(run_dir: Path, **more: Any) -> RunInfo:
    known: dict[str, Any] = {
        "name": "a name",
        "run_id": "run-1",
        "config": {"seed": 3, "policy": {"api_key": SECRET, "api_key_env": "OPENAI_API_KEY", "model": "a-model"}},
        "provenance": {"argv": ["ares_exp", "seed=3"], "choices": {"env": "harbor"}},
    }
    return RunInfo(run_dir=run_dir, **{**known, **more})
