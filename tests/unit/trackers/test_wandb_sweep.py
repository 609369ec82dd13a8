"""A W&B sweep drives the same command: its agent puts the command line together, and gets the run it waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.trackers.wandb_service import WandbService

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


@pytest.mark.once
@pytest.mark.local
def test_the_run_of_a_sweep_is_the_agent_s_and_tells_its_objective(service: WandbService, tmp_path: Path) -> None:
    command = agent_command(SWEEP, experiment="smoke", seed=2, **{"timeouts.agent": 30.5})
    assert command == [
        "/usr/bin/env",
        "python",
        "-m",
        "ares_exp",
        "experiment=smoke",
        "seed=2",
        "timeouts.agent=30.5",
    ]
    told = {"WANDB_SWEEP_ID": "the-sweep", "WANDB_RUN_ID": "the-run"}
    done = subprocess.run(
        [sys.executable, *command[2:]], cwd=tmp_path, env={**os.environ, **told}, capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(service.runs) == ["the-run"]
    assert service.runs["the-run"][0]["sweep"] == "the-sweep"
    assert service.summary("the-run")[yaml.safe_load(SWEEP)["metric"]["name"]] == 1.0
