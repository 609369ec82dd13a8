"""Which tasks a run ran is in W&B, also of an environment whose tasks have no folder."""

import json
from pathlib import Path

import pytest

from tests.conftest import Cli

pytestmark = pytest.mark.once


def test_twenty_questions_objects_are_a_run_input(cli: Cli, tmp_path: Path) -> None:
    done = cli("env=twenty_questions", "env.tasks=[dog,cat]", "tracker=wandb", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    wandb = tmp_path / "run" / "wandb"
    assert json.loads((wandb / "run.json").read_text())["task_set"] == "task-set-TwentyQuestionsEnvironments"
    assert [path.name for path in (wandb / "task-set").iterdir()] == ["tasks.json"]
    digests = json.loads((wandb / "task-set" / "tasks.json").read_text())
    assert sorted(digests) == ["cat", "dog"]
    assert digests == json.loads((tmp_path / "run" / "provenance.json").read_text())["tasks"]
