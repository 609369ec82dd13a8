"""SWE-bench on an engine, as a user runs it: images are built from a small repository, and all verdicts are reached."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from ares_exp.config.overrides import listed
from tests.conftest import Cli
from tests.swebench_rows import SUBMIT, UNITTEST, make_repository, make_row, reply, write_rows

pytestmark = pytest.mark.docker

GIT = (
    "command -v git || { apt-get update -qq && "
    "DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends git >/dev/null; }"
)
FIX = reply("sed -i 's/a - b/a + b/' calc.py")
SLOW = reply("printf 'import time\\ntime.sleep(1000)\\n' > calc.py")


@pytest.fixture
def names(engine: docker.DockerClient) -> Iterator[dict[str, str]]:
    """Names of rows that nobody else has; their images are removed."""
    unique = uuid.uuid4().hex[:8]
    found = {what: f"demo__calc-{unique}-{what}" for what in ("resolved", "unresolved", "broken", "slow")}
    yield found
    for image in engine.api.images():
        for tag in image["RepoTags"] or ():
            if unique in tag:
                engine.api.remove_image(tag, force=True)


def test_rows_on_an_engine(cli: Cli, tmp_path: Path, names: dict[str, str]) -> None:
    repository, base = make_repository(tmp_path / "repositories")
    rows = write_rows(tmp_path / "rows.jsonl", *(make_row(repository, base, name) for name in names.values()))
    common = (
        "env=swebench",
        f"env.dataset={rows}",
        "env.build=true",
        f"env.repository={repository}",
        f"env.cache_dir={tmp_path / 'cache'}",
        f"env.setup={listed([GIT])}",
        *UNITTEST,
        "container=docker",
        "tracker=none",
        "concurrency=4",
    )
    oracle = cli(*common, f"env.tasks={names['resolved']}", "policy=oracle", "hydra.run.dir=oracle")
    assert oracle.returncode == 0, oracle.stderr
    [result] = results(tmp_path / "oracle")
    assert (result["reward"], result["outcome"]) == (1.0, "completed")
    assert result["container_image"].startswith("ares-exp/")

    script = {"resolved": [FIX], "unresolved": [], "broken": [reply("rm -rf .git")], "slow": [SLOW]}
    replies = ",".join(f"{names[what]}:{listed([*said, SUBMIT])}" for what, said in script.items())
    played = cli(
        *common,
        "policy=scripted",
        f"policy.replies={{{replies}}}",
        "env.test_timeout_sec=6",
        "hydra.run.dir=scripted",
    )
    assert played.returncode != 0, "an episode has no reward"
    found = {one["task_name"]: one for one in results(tmp_path / "scripted")}
    reports = {what: report(tmp_path / "scripted", found[name]) for what, name in names.items()}
    assert {what: found[name]["reward"] for what, name in names.items()} == {
        "resolved": 1.0,
        "unresolved": 0.0,
        "broken": 0.0,
        "slow": None,
    }
    assert found[names["unresolved"]]["rewards"] == {"reward": 0.0, "f2p": 0.0, "p2p": 1.0}
    assert reports["unresolved"]["tests_status"]["FAIL_TO_PASS"]["failure"]
    assert found[names["slow"]]["outcome"] == "verifier_error"
    assert found[names["slow"]]["error"]["type"] == "VerifierTimeoutError"
    assert "gives no patch" in reports["broken"]["reason"]
    assert "test_timeout_sec" in reports["slow"]["reason"]


def results(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "episodes.jsonl").read_text().splitlines()]


def report(run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    path = run_dir / "files" / result["episode_id"] / "verifier" / "report.json"
    found: dict[str, Any] = json.loads(path.read_text())[result["task_name"]]
    return found
