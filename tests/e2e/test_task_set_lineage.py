"""Which tasks a run played is in W&B, also of an environment whose tasks have no folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.unit.trackers.wandb_file import WandbFile

pytestmark = pytest.mark.once


def test_the_objects_of_twenty_questions_are_an_input_of_the_run(cli: Cli, tmp_path: Path) -> None:
    done = cli("env=twenty_questions", "env.tasks=[dog,cat]", "tracker=wandb", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    recorded = WandbFile(tmp_path / "run")
    (artifact,) = recorded.artifacts("task-set")
    assert artifact.use_after_commit
    (entry,) = artifact.manifest.contents
    digests = json.loads(Path(entry.local_path).read_text())
    assert sorted(digests) == ["cat", "dog"]
    assert digests == json.loads((tmp_path / "run" / "provenance.json").read_text())["tasks"]
    assert recorded.config["inputs"] == [{"name": artifact.name, "digest": artifact.digest}]
