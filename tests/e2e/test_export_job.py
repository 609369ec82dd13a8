"""A run that was really run, exported as a Harbor job."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ares_exp.tasks.task_set import SAMPLES
from tests.unit.trajectories.atif_schema import validate_atif
from tests.warm_start import warm_command

HARBOR_CHECK = Path(__file__).parent.parent / "unit" / "commands" / "harbor_export" / "harbor_check.py"


def write_script(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


def write_task(root: Path) -> None:
    (root / "environment").mkdir(parents=True)
    (root / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
    (root / "task.toml").write_text('schema_version = "1.3"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for name in ("one", "two"):
        step = root / "steps" / name
        write_script(step / "solution" / "solve.sh", f"touch /app/{name}")
        write_script(step / "tests" / "test.sh", f"test -f /app/{name} && echo 1 > /logs/verifier/reward.txt")
        (step / "instruction.md").write_text(f"Make {name}.\n")


@pytest.mark.local
@pytest.mark.once
def test_recorded_run_becomes_a_harbor_job(cli: Any, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "two-steps")
    (tmp_path / "tasks" / "write-greeting").symlink_to(SAMPLES / "write-greeting")
    done = cli("env.path=tasks", "attempts=2", "tracker=none", "name=run", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    command = [*warm_command(), "export", "run", "jobs/first", "--to", "harbor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 trials, 0 of them with an error.\n" in done.stdout
    job = tmp_path / "jobs" / "first"
    stats = json.loads((job / "result.json").read_text())["stats"]
    [(key, evals)] = stats["evals"].items()
    assert (key, evals["metrics"], evals["pass_at_k"]) == ("ShellAgent__oracle__tasks", [{"mean": 1.0}], {"2": 1.0})
    trials = [json.loads(path.read_text()) for path in job.glob("*/result.json")]
    assert {trial["task_name"] for trial in trials} == {"two-steps", "write-greeting"}
    for trial in trials:
        folder = job / trial["trial_name"]
        steps = [folder / "steps" / step["step_name"] for step in trial["step_results"] or ()]
        assert len(steps) == (2 if trial["task_name"] == "two-steps" else 0)
        validate_atif(json.loads((folder / "agent" / "trajectory.json").read_text()))
        for place in steps or [folder]:
            assert (place / "verifier" / "reward.txt").exists()
    if (harbor := os.environ.get("ARES_EXP_HARBOR_PYTHON")) is not None:
        command = [harbor, "-W", "ignore", str(HARBOR_CHECK), str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stdout) == (0, "4 trials, 4 with a result\n"), done.stderr
