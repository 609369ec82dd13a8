"""Sweeps with every launcher: bad jobs, secrets, Ctrl-C, kill -9, resume, and the final report."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.commands.cli.run_command import run_command
from tests.leaks import processes, wait_until
from tests.loopback_endpoint import LoopbackEndpoint
from tests.warm_start import WarmProcess

pytestmark = pytest.mark.local

LAUNCHERS = [
    pytest.param("basic", "none"),
    pytest.param("joblib", "none", marks=[pytest.mark.once, pytest.mark.nightly]),
    pytest.param("joblib", "wandb", marks=[pytest.mark.once, pytest.mark.nightly]),
    pytest.param("submitit_local", "none", marks=[pytest.mark.once, pytest.mark.nightly]),
]


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return found


@pytest.mark.parametrize(("launcher", "tracker"), LAUNCHERS)
def test_refused_job_does_not_stop_a_sweep(cli: Any, tmp_path: Path, launcher: str, tracker: str) -> None:
    done = cli(
        "-m",
        f"tracker={tracker}",
        "env.limit=1",
        "limits.steps=5,-1,6",
        "hydra.sweep.dir=s",
        f"hydra/launcher={launcher}",
        env={"WANDB_MODE": "offline"},
    )
    assert done.returncode == 2
    assert "job 1 failed: Expected `limits.steps` to be at least 1, got -1" in done.stdout
    assert (done.stdout + done.stderr).count("got -1") == 1
    assert "Traceback" not in done.stderr
    rows = report(tmp_path / "s")["jobs"]
    assert [(row["overrides"], row["state"]) for row in rows] == [
        ({"limits.steps": "5"}, "complete"),
        ({"limits.steps": "-1"}, "failed"),
        ({"limits.steps": "6"}, "complete"),
    ]
    assert [row["objective"] for row in rows] == [1.0, None, 1.0]
    files = sorted((tmp_path / "s").glob("*/wandb/offline-run-*/*.wandb"))
    assert len(files) == (2 if tracker == "wandb" else 0)
    for file in files:
        assert b"default/s" in file.read_bytes(), "the group is the sweep, in every process"


def test_directory_belongs_to_one_sweep_and_process(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    command = ("-m", "tracker=none", "env.limit=1", "seed=1")
    for used in ("runs", "runs/first"):
        done = cli(*command, f"hydra.sweep.dir={used}")
        assert done.returncode == 2
        assert f"{used} contains another run" in done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "first", "runs"]
    (tmp_path / "s").mkdir()
    held = os.open(tmp_path / "s", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = cli(*command, "hydra.sweep.dir=s")
    finally:
        os.close(held)
    assert done.returncode == 2
    assert "The sweep in s is running" in done.stderr
    assert not list((tmp_path / "s").iterdir())


def test_typed_secrets_stay_out_of_the_sweeps_folder(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    command = [
        "-m",
        "tracker=none",
        "policy=openai",
        "policy.model=m",
        f"policy.base_url={endpoint.url}",
        "policy.api_key_env=null",
        "+policy.extra_body.api_token=typed-secret-value",
        "env.limit=1",
        "seed=1,2",
        "hydra.sweep.dir=s",
    ]
    refused = cli(*command, "hydra/launcher=submitit_local")
    assert refused.returncode == 2
    assert "writes your command to disk" in refused.stderr
    assert not (tmp_path / "s").exists()
    done = cli(*command, "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s" / "multirun.yaml").exists()
    for path in (tmp_path / "s").rglob("*"):
        assert path.is_dir() or b"typed-secret-value" not in path.read_bytes(), path


@pytest.mark.nightly
@pytest.mark.once
def test_optuna_continues_after_a_failed_job(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    command = [
        "-m",
        "tracker=none",
        "env.limit=1",
        "hydra/sweeper=optuna_maximize",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=2",
        "limits.steps=range(-3,6)",
        "hydra.sweep.dir=s",
    ]
    done = cli(*command)
    found = report(tmp_path / "s")
    states = [row["state"] for row in found["jobs"]]
    assert {"complete", "failed"} == set(states), done.stdout
    assert done.returncode == 2
    best = next(row for row in found["jobs"] if row["job"] == found["best"])
    optimum = (tmp_path / "s" / "optimization_results.yaml").read_text()
    assert f"limits.steps: {best['overrides']['limits.steps']}" in optimum
    again = cli(*command, "resume=true")
    assert [f"#{number}: complete before" in again.stdout for number in range(2)] == [
        state == "complete" for state in states
    ]


class Sweep:
    def __init__(self, folder: Path, *words: str) -> None:
        self.mark = f"61.{uuid.uuid4().int % 10**12:012}"
        self.folder = folder / "s"
        self.process = WarmProcess(
            [
                *("-m", "tracker=none", "policy=scripted", "env.limit=1"),
                *("seed=1,2", "limits.steps=8,9", "hydra.sweep.dir=s", *words),
                f"policy.replies=['```bash\nsleep {self.mark}\n```']",
            ],
            cwd=folder,
            stderr=subprocess.STDOUT,
        )

    def sleeping(self) -> int:
        return sum(words == f"sleep {self.mark} " for *_, words in processes())

    def reach(self, number: int) -> None:
        assert wait_until(lambda: self.sleeping() == number or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        self.family = {pid for pid, parent, *_ in processes() if parent == self.process.pid}


@pytest.fixture
def side_by_side(tmp_path: Path) -> Iterator[Sweep]:
    """Two jobs at a time, in separate processes, in the middle of their commands."""
    sweep = Sweep(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    try:
        sweep.reach(2)
        yield sweep
    finally:
        sweep.process.kill()
        sweep.process.communicate()
        assert wait_until(lambda: not sweep.sleeping())


@pytest.mark.once
def test_orders_and_ctrl_c_reach_parallel_jobs(side_by_side: Sweep) -> None:
    words = [str(side_by_side.folder), "pause", "--wait", "60"]
    assert run_command("ctl", words, "ares-exp ctl") == 0
    noted = [json.loads(path.read_text()) for path in side_by_side.folder.glob("[01]/control.jsonl")]
    assert [(line["verb"], line["outcome"]) for line in noted] == [("pause", "done")] * 2
    os.killpg(side_by_side.process.pid, signal.SIGINT)
    out, _ = side_by_side.process.communicate(timeout=60)
    assert side_by_side.process.returncode == 130, out
    assert "Traceback" not in out
    assert wait_until(lambda: not side_by_side.sleeping())
    assert wait_until(lambda: not is_alive(side_by_side.family))
    rows = report(side_by_side.folder)["jobs"]
    assert [row["state"] for row in rows] == ["incomplete", "incomplete", "not started", "not started"]
    assert [row["outcomes"] for row in rows[:2]] == [{"cancelled": 1}] * 2, "they ended in good order"
    assert not [row["objective"] for row in rows if row["objective"] is not None], "nothing ended: nothing is rated"


@pytest.mark.once
@pytest.mark.nightly
def test_parallel_jobs_end_with_a_killed_sweep(side_by_side: Sweep) -> None:
    side_by_side.process.kill()
    side_by_side.process.wait()
    assert wait_until(lambda: not side_by_side.sleeping())
    assert wait_until(lambda: not is_alive(side_by_side.family)), "and the launcher's idle processes are gone, too"


def is_alive(family: set[int]) -> bool:
    return any(pid in family for pid, *_ in processes())


@pytest.mark.once
def test_killed_sweep_resumes_job_by_job(cli: Any, tmp_path: Path) -> None:
    words = [
        *("-m", "tracker=none", "env.limit=1", "seed=1,2", "limits.steps=8,9"),
        *("policy=scripted", "policy.repeat_last=true", "attempts=2", "concurrency=1", "hydra.sweep.dir=s"),
        "policy.replies=['```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```']",
    ]
    process = WarmProcess(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "s"
    try:
        assert wait_until(lambda: list(folder.glob("*/results.json")) or process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it was complete before it could be killed"
    assert wait_until(lambda: not [words for *_, words in processes() if f"{folder}" in words])
    before = digests(folder)
    complete = [path.parent.name for path in folder.glob("*/results.json")]

    assert cli("-m", "seed=3", "hydra.sweep.dir=s").returncode == 2, "another sweep would be a mixture"
    assert digests(folder) == before

    done = cli("resume=s")
    assert done.returncode == 0, done.stderr
    for number in complete:
        assert f"#{number}: complete before" in done.stdout
    rows = report(folder)["jobs"]
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert [row["overrides"] for row in rows] == [
        {"seed": seed, "limits.steps": limit} for seed in "12" for limit in "89"
    ]
    for path, digest in before.items():
        assert digests(folder)[path] == digest, "Hydra's records stay as they were"
    assert "4 jobs: 4 complete" in done.stdout
    assert {path.parent.parent.name for path in folder.glob("*/.hydra/overrides.yaml")} == set("0123")


def digests(folder: Path) -> dict[str, str]:
    """Hydra's records of the sweep, and of the jobs that have started."""
    started = [path.parent for path in folder.glob("*/config.yaml")]
    files = [folder / "multirun.yaml", *(file for job in started for file in (job / ".hydra").iterdir())]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
