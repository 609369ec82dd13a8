"""The W&B runs of the real command: how each kind of run is filed, and the run that a W&B sweep waits for."""

import os
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.conftest import run_command
from tests.unit.trackers.wandb_service import ServedRun, WandbService, wandb_sync
from tests.warm_start import warm_command

pytestmark = [pytest.mark.once, pytest.mark.local]

SWEEP = """
project: ares_exp
method: grid
metric: {name: objective, goal: maximize}
parameters:
  experiment: {value: smoke}
  seed: {values: [1, 2]}
  timeouts.agent: {value: 30.5}
command: ["${env}", python, -m, ares_exp, "${args_no_hyphens}"]
"""


def agent_command(sweep: str, **values: object) -> list[str]:
    """What the agent of a sweep runs for a point of it, as wandb's agent puts it together."""
    from wandb.sdk.launch.sweeps import utils

    arguments = {name: {"value": value} for name, value in values.items()}
    known = {**utils.create_sweep_command_args({"args": arguments}), "env": ["/usr/bin/env"]}
    command = utils.create_sweep_command(yaml.safe_load(sweep)["command"])
    return [part for word in command for part in (known[word[2:-1]] if word.startswith("${") else [word])]


def test_sweep_run_logs_its_objective(service: WandbService, tmp_path: Path) -> None:
    command = agent_command(SWEEP, experiment="smoke", seed=2, **{"timeouts.agent": 30.5})
    assert command[2:] == ["-m", "ares_exp", "experiment=smoke", "seed=2", "timeouts.agent=30.5"]
    told = {"WANDB_SWEEP_ID": "the-sweep", "WANDB_RUN_ID": "the-run"}
    done = run_command((*warm_command(), *command[4:]), tmp_path, {**os.environ, **told})
    assert done.returncode == 0, done.stderr
    assert list(service.runs) == ["the-run"]
    assert service.runs["the-run"][0]["sweep"] == "the-sweep"
    assert ServedRun(service, "the-run").summary[yaml.safe_load(SWEEP)["metric"]["name"]] == 1.0


FILED = {
    ("run", None): ["hydra.run.dir=first"],
    ("run", "study/sweep"): ["-m", "name=study", "seed=1,2", "hydra.sweep.dir=sweep"],
    ("replay", None): ["replay=first", "hydra.run.dir=replay"],
    ("branch", None): ["branch_from=first/write-greeting@1", "hydra.run.dir=branch"],
}
"""Job type and group of runs, and their command lines."""


def test_runs_are_filed_by_their_kind_and_choices(service: WandbService, tmp_path: Path) -> None:
    offline = ("env.tasks=write-greeting", "tracker.wandb.mode=offline", "tracker.wandb.tags=[mine]")
    for command in FILED.values():
        done = run_command((*warm_command(), *command, *offline), tmp_path)
        assert done.returncode == 0, done.stderr
    assert service.asked == []
    wandb_sync(tmp_path)

    runs = [ServedRun(service, run_id) for run_id in service.runs]
    filed = Counter((run.first["jobType"], run.first["groupName"]) for run in runs)
    assert filed == {kind: 2 if kind[1] else 1 for kind in FILED}
    for run in runs:
        assert run.first["tags"] == ["mine"]
        assert (run.config["choices"]["env"], run.config["choices"]["agent"]) == ("harbor", "shell")
        assert "env.tasks=write-greeting" in run.config["command"]
        assert "model" in run.config
        assert "task-set-samples" in {one["name"] for one in run.config["inputs"]}
