"""A preset on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = ("env=harbor", "env.tasks=write-greeting", "tracker=none")
SUBMIT = "policy.replies=['```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```']"


@pytest.mark.once
@pytest.mark.local
@pytest.mark.parametrize(("policy", "reward"), [(["policy=oracle"], 1.0), (["policy=scripted", SUBMIT], 0.0)])
def test_the_samples_are_a_preset(cli: Any, tmp_path: Path, policy: list[str], reward: float) -> None:
    done = cli(*ARGUMENTS, *policy, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    [row] = map(json.loads, (tmp_path / "run" / "episodes.jsonl").read_text().splitlines())
    assert (row["task_name"], row["reward"]) == ("write-greeting", reward)
