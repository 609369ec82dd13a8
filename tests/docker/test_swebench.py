"""SWE-bench on an engine, as a user runs it: images are built from a small repository, and all verdicts are reached."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.config.overrides import listed
from tests.conftest import Cli, rows
from tests.swebench_rows import SUBMIT, git, make_row, put_harness_on_path, reply, write_rows

pytestmark = pytest.mark.docker

FIX = reply("sed -i 's/a - b/a + b/' calc.py")
SLOW = reply("printf 'import time\\ntime.sleep(1000)\\n' > calc.py")


NAMES = {what: f"demo__calc-{what}" for what in ("resolved", "unresolved", "broken", "slow")}


def test_rows_reach_every_verdict_on_an_engine(
    cli: Cli, tmp_path: Path, swebench_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_harness_on_path(tmp_path / "harness", monkeypatch)
    repository = tmp_path / "repositories" / "demo" / "calc"
    base = git(repository, "rev-parse", "HEAD~1").strip()
    made = [make_row(repository, base, name, image=swebench_image) for name in NAMES.values()]
    for row in made:
        row |= {name: row[name].rstrip("\n") for name in ("patch", "test_patch")}  # as a copy may have lost them
    dataset = write_rows(tmp_path / "rows.jsonl", *made)
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    common = ("env=swebench", f"env.dataset={dataset}", "container=docker", "tracker=none", "concurrency=4")
    oracle = cli(*common, f"env.tasks={NAMES['resolved']}", "policy=oracle", "hydra.run.dir=oracle", env=env)
    assert oracle.returncode == 0, oracle.stderr
    [result] = rows(tmp_path / "oracle")
    assert (result["reward"], result["outcome"]) == (1.0, "completed")
    assert result["container_image"] == swebench_image
    kept = {path.name for path in (tmp_path / "oracle" / "files" / result["episode_id"]).rglob("*") if path.is_file()}
    assert kept == {"model.patch", "test_output.txt", "report.json", "reward.json"}

    script = {"resolved": [FIX], "unresolved": [], "broken": [reply("rm -rf .git")], "slow": [SLOW]}
    replies = ",".join(f"{NAMES[what]}:{listed([*said, SUBMIT])}" for what, said in script.items())
    ran = cli(
        *common,
        "policy=scripted",
        f"policy.replies={{{replies}}}",
        "env.test_timeout_sec=6",
        "hydra.run.dir=scripted",
        env=env,
    )
    assert ran.returncode != 0, "an episode has no reward"
    found = {one["task_name"]: one for one in rows(tmp_path / "scripted")}
    reports = {what: report(tmp_path / "scripted", found[name]) for what, name in NAMES.items()}
    assert {what: found[name]["reward"] for what, name in NAMES.items()} == {
        "resolved": 1.0,
        "unresolved": 0.0,
        "broken": 0.0,
        "slow": None,
    }
    assert found[NAMES["unresolved"]]["rewards"] == {"reward": 0.0, "f2p": 0.0, "p2p": 1.0}
    assert reports["unresolved"]["tests_status"]["FAIL_TO_PASS"]["failure"]
    assert found[NAMES["slow"]]["outcome"] == "verifier_error"
    assert found[NAMES["slow"]]["error"]["type"] == "VerifierTimeoutError"
    assert "The patch cannot be read" in reports["broken"]["reason"]
    assert "test_timeout_sec" in reports["slow"]["reason"]


def report(run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    path = run_dir / "files" / result["episode_id"] / "verifier" / "report.json"
    return json.loads(path.read_text())[result["task_name"]]
