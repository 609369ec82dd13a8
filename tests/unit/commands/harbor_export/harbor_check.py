"""Opens an exported job with Harbor's own code: `python harbor_check.py JOB`, with a Python that has Harbor."""

import json
import sys
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from harbor.metrics.mean import Mean
from harbor.models.job.config import JobConfig
from harbor.models.job.result import JobResult, JobStats
from harbor.models.trial.artifact_manifest import ArtifactManifest
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.trial.result import TrialResult
from harbor.utils.pass_at_k import compute_pass_at_k_by_evals
from harbor.utils.trajectory_validator import TrajectoryValidator
from harbor.viewer.scanner import JobScanner
from harbor.viewer.server import create_app


def check(job: Path) -> str:
    """Checks everything there is; returns what it was."""
    config = JobConfig.model_validate_json((job / "config.json").read_text())
    kept(config.model_dump_json(), (job / "config.json").read_text(), "the job's config.json")
    result = JobResult.model_validate_json((job / "result.json").read_text())
    same(result.model_dump_json(exclude={"trial_results"}), (job / "result.json").read_text(), "the job's result.json")
    folders = sorted(path for path in job.iterdir() if path.is_dir())
    trials = [trial for folder in folders if (trial := check_trial(folder)) is not None]
    stats = stats_of(trials, result)
    same(stats.model_dump_json(), result.stats.model_dump_json(), "the statistics")
    check_viewer(job, folders)
    return f"{len(folders)} trials, {len(trials)} with a result"


def check_trial(folder: Path) -> TrialResult | None:
    config = TrialConfig.model_validate_json((folder / "config.json").read_text())
    kept(config.model_dump_json(), (folder / "config.json").read_text(), f"{folder}/config.json")
    assert config.trial_name == folder.name
    for trajectory in folder.rglob("agent/trajectory.json"):
        validator = TrajectoryValidator()
        assert validator.validate(trajectory), (trajectory, validator.get_errors())
    for manifest in folder.rglob("artifacts/manifest.json"):
        ArtifactManifest(entries=json.loads(manifest.read_text()))
    if not (folder / "result.json").exists():
        return None
    result = TrialResult.model_validate_json((folder / "result.json").read_text())
    kept(result.model_dump_json(), (folder / "result.json").read_text(), f"{folder}/result.json")
    assert result.config == config
    assert result.trial_name == folder.name
    assert (folder / "exception.txt").exists() == (result.exception_info is not None)
    for step in result.step_results or ():
        assert TrialPaths(folder).step_agent_dir(step.step_name).is_dir()
    return result


def stats_of(trials: list[TrialResult], result: JobResult) -> JobStats:
    """What Harbor makes of the trials itself, as at the end of a job."""
    given = result.stats
    stats = JobStats.from_trial_results(
        trials,
        n_total_trials=result.n_total_trials,
        n_running_trials=given.n_running_trials,
        n_retries=given.n_retries,
    )
    for key, one in stats.evals.items():
        of_key = [trial for trial in trials if _evals_key(trial) == key]
        one.metrics = [Mean().compute([t.verifier_result.rewards if t.verifier_result else None for t in of_key])]
    for key, numbers in compute_pass_at_k_by_evals(trials).items():
        stats.evals[key].pass_at_k = numbers
    for of_both in (stats, given):  # the order of names and sums of floats is no matter
        for one in of_both.evals.values():
            for names in (*(names for each in one.reward_stats.values() for names in each.values()),):
                names.sort()
            for names in one.exception_stats.values():
                names.sort()
    return stats


def _evals_key(trial: TrialResult) -> str:
    model = trial.agent_info.model_info
    return JobStats.format_agent_evals_key(
        trial.agent_info.name, model.name if model else None, trial.source or "adhoc"
    )


def check_viewer(job: Path, folders: list[Path]) -> None:
    scanner = JobScanner(job.parent)
    assert scanner.get_job_config(job.name) is not None
    assert scanner.get_job_result(job.name) is not None
    assert scanner.list_trials(job.name) == sorted(folder.name for folder in folders)
    with TestClient(create_app(job.parent)) as client:

        def get(path: str) -> Any:
            response = client.get(f"/api/jobs{path}")
            assert response.status_code == 200, (path, response.status_code, response.text)
            return response.json()

        summary = next(one for one in get("")["items"] if one["name"] == job.name)
        assert summary["n_total_trials"] >= len(folders)
        assert len(get(f"/{job.name}/trials?page_size=100")["items"]) == min(len(folders), 100)
        assert get(f"/{job.name}/tasks")["items"]
        for folder in folders:
            steps = [path.name for path in sorted((folder / "steps").glob("*"))] or [None]
            assert get(f"/{job.name}/trials/{folder.name}")["trial_name"] == folder.name
            for step in steps:
                place = folder / "steps" / step if step else folder
                query = f"?step={step}" if step else ""
                for what in ("trajectory", "verifier-output", "artifacts", "agent-logs", "files"):
                    got = get(f"/{job.name}/trials/{folder.name}/{what}{query}")
                    if what == "artifacts":
                        assert (got["manifest"] is not None) == (place / "artifacts" / "manifest.json").exists()
                    if what == "trajectory" and (place / "agent" / "trajectory.json").exists():
                        assert got["steps"], got


def same(ours: str, theirs: str, what: str) -> None:
    first, second = _comparable(json.loads(ours)), _comparable(json.loads(theirs))
    assert first == second, f"{what}: Harbor's {json.dumps(first)[:3000]} is not ours, {json.dumps(second)[:3000]}"


def kept(harbors: str, ours: str, what: str) -> None:
    """Harbor's model keeps all that we wrote; it may add what is at its default."""
    theirs, own = _comparable(json.loads(harbors)), _comparable(json.loads(ours))
    assert _is_part(own, theirs), f"{what}: of {json.dumps(own)[:3000]} Harbor has {json.dumps(theirs)[:3000]}"


def _is_part(own: Any, theirs: Any) -> bool:
    if isinstance(own, dict) and isinstance(theirs, dict):
        return all(key in theirs and _is_part(value, theirs[key]) for key, value in own.items())
    if isinstance(own, list) and isinstance(theirs, list):
        return len(own) == len(theirs) and all(map(_is_part, own, theirs))
    return bool(own == theirs)


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, float):
        return round(value, 9)
    return [_comparable(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.stdout.write(check(Path(sys.argv[1]).resolve()) + "\n")
