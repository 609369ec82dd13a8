"""The folder of a job as a run leaves it."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from ares_exp.records.results import EpisodeResult, Outcome, RunSummary


def result(task: str, attempt: int, reward: float | None, outcome: Outcome = Outcome.COMPLETED) -> EpisodeResult:
    return EpisodeResult(f"{task}-{attempt}", task, attempt, 0, outcome, reward, prompt_tokens=10, cost=0.5)


def record(
    folder: Path,
    results: Sequence[EpisodeResult],
    *,
    tasks: Sequence[str] = ("a", "b"),
    attempts: int = 1,
    overrides: Sequence[str] = (),
    ended: bool = True,
    must_pass: bool = False,
    **config: object,
) -> Path:
    """Writes the folder; `ended` sets whether the run wrote its summary."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    (folder / ".hydra" / "hydra.yaml").write_text("hydra: {}\n")
    (folder / "config.yaml").write_text(yaml.safe_dump({"attempts": attempts, "env": {"tasks": list(tasks)}, **config}))
    (folder / "provenance.json").write_text(json.dumps({"run_id": folder.name, "tasks": dict.fromkeys(tasks)}))
    (folder / "episodes.jsonl").write_text("".join(json.dumps(one.to_dict()) + "\n" for one in results))
    if ended:
        summary = RunSummary(len(tasks) * attempts, tuple(results), wall_sec=2.0, must_pass=must_pass)
        (folder / "summary.json").write_text(json.dumps(summary.to_dict()))
    return folder
