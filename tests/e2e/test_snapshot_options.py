"""The options of `snapshot` as a user gives them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ares_exp.snapshots.store import SnapshotStore
from tests.conftest import rows
from tests.leaks import wait_until
from tests.warm_start import WarmProcess

pytestmark = [pytest.mark.once, pytest.mark.local]

GREET = "```bash\necho 'Hello, harbor!' > /app/greeting.txt\n```"
LOOK = "```bash\nls\n```"
SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
ONE = "env.tasks=write-greeting"

WAITS_FOR_A_SNAPSHOT = """
import asyncio
from pathlib import Path

from ares_exp.llms.response import LLMResponse

class Policy:
    async def __call__(self, request):
        Path("asked").touch()
        while not list(Path("run/snapshots").glob("*@*/snapshot.json")):
            await asyncio.sleep(0.02)
        return LLMResponse.from_text("```bash\\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n```")
"""


def answering(tmp_path: Path, responses: list[str] | dict[str, list[str]], **more: Any) -> list[str]:
    node = {"_target_": "ares_exp.policies.scripted.ScriptedPolicy", "_convert_": "all", "replies": responses, **more}
    return option(tmp_path, node)


def option(tmp_path: Path, node: dict[str, Any]) -> list[str]:
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "mine.yaml").write_text(f"# mine\n{json.dumps(node)}\n")
    return ["--config-dir", "options", "tracker=none", "policy=mine"]


@pytest.mark.parametrize("wrapper", ["async", pytest.param("sync", marks=pytest.mark.nightly)])
def test_every_step_has_a_snapshot(cli: Any, tmp_path: Path, wrapper: str) -> None:
    done = cli(
        *answering(tmp_path, [GREET, LOOK, SUBMIT]),
        ONE,
        "snapshot=every_step",
        f"wrapper={wrapper}",
        "hydra.run.dir=run",
        "attempts=2",
    )
    assert done.returncode == 0, done.stderr
    store = SnapshotStore(tmp_path / "run" / "snapshots")
    written = rows(tmp_path / "run")
    assert store.ids() == sorted(f"{row['episode_id']}@{step}" for row in written for step in range(3))
    assert all(store.verify(name).ok for name in store.ids())
    assert [(row["snapshots"], row["snapshot_failures"]) for row in written] == [(3, 0)] * 2
    assert all(row["phase_sec"]["snapshot"] >= 0 for row in written)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["snapshots"], summary["snapshot_failures"]) == (6, 0)
    assert "6 snapshots in run/snapshots" in done.stdout


def test_signal_takes_a_snapshot_during_a_request(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WAITS_FOR_A_SNAPSHOT)
    policy = option(tmp_path, {"_target_": "mine.Policy"})
    words = [*policy, ONE, "snapshot=manual", "hydra.run.dir=run"]
    process = WarmProcess(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert wait_until(lambda: (tmp_path / "asked").exists() or process.poll() is not None)
    assert not list((tmp_path / "run").glob("snapshots/*@*"))
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "1 snapshot in run/snapshots" in out
    [row] = rows(tmp_path / "run")
    assert SnapshotStore(tmp_path / "run" / "snapshots").ids() == [f"{row['episode_id']}@0"]


def test_snapshots_are_complete_after_ctrl_c(tmp_path: Path) -> None:
    words = ["limits.steps=null", "snapshot=every_step", "hydra.run.dir=run"]
    process = WarmProcess([*answering(tmp_path, [LOOK], repeat_last=True), *words], cwd=tmp_path)
    assert wait_until(lambda: len([*tmp_path.glob("run/snapshots/*@*")]) > 8 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    store = SnapshotStore(tmp_path / "run" / "snapshots")
    written = rows(tmp_path / "run")
    assert [row["outcome"] for row in written] == ["cancelled"] * 4
    assert sum(row["snapshots"] for row in written) == len(store.ids())
    assert all(store.verify(name).ok for name in store.ids())
    assert not list(store.path.glob(".tmp-*"))
    assert f"{len(store.ids())} snapshots in run/snapshots" in out
    assert "Traceback" not in err
