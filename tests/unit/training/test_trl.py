"""Trainings by TRL: real steps of a tiny model, whose rewards rise, and which go on after a kill where they were."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.commands.cli.main import main
from ares_exp.errors import ConfigError, UserError
from ares_exp.training.trl import Grpo, last_checkpoint
from tests.unit.training.counted_tasks import KILL, TASKS, Counted, options

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]  # there may be much beside it

STEPS = 8
REPLIES = ("yes indeed", "no way", "perhaps so")
COMMON = (
    *("+trainer=grpo", "env=counted", "policy=transformers", "policy.max_output_tokens=1", "tracker=jsonl"),
    *("concurrency=16", "trainer.groups_per_step=4", "trainer.group_size=8", "trainer.batch_size=16"),
    *(f"trainer.steps={STEPS}", "trainer.learning_rate=0.03", "trainer.heldout=[cider]", "trainer.eval_every=4"),
    *("trainer.eval_attempts=8", "trainer.checkpoint_every=2"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ares_exp.training.toy import write_model

    return write_model(tmp_path_factory.mktemp("model"), REPLIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return options(tmp_path_factory.mktemp("options"))


@pytest.fixture(scope="module")
def trained(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was left alone."""
    return execute(model, folder, tmp_path_factory.mktemp("trained") / "run").run_dir


@pytest.fixture(autouse=True)
def everything_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert Counted.open_ == 0


def execute(model: Path, folder: Path, run: Path, *overrides: str) -> Any:
    place = [f"policy.model={model}", f"hydra.run.dir={run}"]
    return ares_exp.run([*COMMON, *place, *overrides], config_dirs=[folder], quiet=True)


def command(*words: str) -> None:
    """Runs a command in a process of its own, which is forked: to import torch and TRL takes longer than to train."""
    Counted.started = 0
    sys.argv = ["ares-exp", *words]
    sys.exit(main())


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def weights(path: Path | None) -> dict[str, Any]:
    from safetensors.torch import load_file

    assert path is not None
    return load_file(path / "model.safetensors")


def test_reward_rises_and_every_weight_changes(trained: Path, model: Path) -> None:
    import torch

    steps = lines(trained, "step")
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    assert [line["version"] for line in steps] == [str(line["step"]) for line in steps]
    assert steps[-1]["train/reward"] > steps[0]["train/reward"] + 0.4
    assert all(line["train/logprob_gap"] < 1e-4 and line["train/without_reward"] == 0 for line in steps)
    before, after = weights(model), weights(last_checkpoint(trained))
    assert [name for name, tensor in before.items() if torch.equal(tensor, after[name])] == []
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == ["checkpoint-6", "checkpoint-8"]
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged if "train/reward" in one] == [*range(1, STEPS + 1)]


def test_held_out_tasks_are_evaluated_without_training(trained: Path) -> None:
    assert {name for line in lines(trained, "round") for name in line["tasks"]} == {"apple", "bread"}
    assert [line["step"] for line in lines(trained, "evaluated")] == [0, 4, 8]
    assert {name for line in lines(trained, "evaluation") for name, _ in line["slots"]} == {"cider"}
    slots = [
        (name, number)
        for kind in ("round", "evaluation")
        for line in lines(trained, kind)
        for name, number in line["slots"]
    ]
    assert len(slots) == len({*slots}) == STEPS * 32 + 3 * 8


def test_every_response_records_its_weights(trained: Path) -> None:
    where = {tuple(slot): line["version"] for line in lines(trained, "round") for slot in line["slots"]}
    for episode in ares_exp.trajectories.load(trained):
        expected = where.get((episode.task_name, episode.metadata["attempt"]))
        responses = [step.action for step in episode.load().steps if step.action is not None]
        assert len(responses) == 2
        assert expected is None or {response["policy_version"] for response in responses} == {expected}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_killed_training_resumes_at_the_same_step(trained: Path, model: Path, folder: Path, tmp_path: Path) -> None:
    """The process is killed within the fifth step's episodes; the last checkpoint is that of step 4."""
    import torch

    KILL.write_text(str(8 + 4 * 32 + 8 + 20))
    words = [*COMMON, f"policy.model={model}", "hydra.run.dir=run", f"--config-dir={folder}"]
    killed = multiprocessing.get_context("fork").Process(target=command, args=("train", *words))
    killed.start()
    killed.join(600)
    assert killed.exitcode == -signal.SIGKILL
    KILL.unlink()
    run = Path("run").absolute()
    assert [line["step"] for line in lines(run, "step")] == [1, 2, 3, 4]
    assert ares_exp.run([f"resume={run}"], config_dirs=[folder], quiet=True).exit_code == 0
    assert [line["started_at"] for line in lines(run, "session")] == [0, 4]
    assert [line["step"] for line in lines(run, "step")] == [*range(1, STEPS + 1)]
    assert [line["slots"] for line in lines(run, "round")] == [line["slots"] for line in lines(trained, "round")]
    before, alone, resumed = weights(model), weights(last_checkpoint(trained)), weights(last_checkpoint(run))
    for name, tensor in alone.items():  # which responses share a batch is chance, and rounding with it
        assert torch.dist(resumed[name], tensor) < 1e-2 * torch.dist(tensor, before[name]), name


async def test_interrupted_training_can_be_resumed(model: Path, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = [f"policy.model={model}", f"hydra.run.dir={run}", "trainer.steps=500"]
    running = asyncio.create_task(ares_exp.arun([*COMMON, *place], config_dirs=[folder], quiet=True))
    while not (run / "checkpoints" / "checkpoint-2").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    started_at = len(lines(run, "step"))
    resumed = await ares_exp.arun(
        [f"resume={run}", f"trainer.steps={started_at + 2}"], config_dirs=[folder], quiet=True
    )
    assert resumed.exit_code == 0
    assert lines(run, "step")[-1]["step"] == started_at + 2


def test_untrainable_config_is_refused_before_the_start(model: Path, folder: Path, tmp_path: Path) -> None:
    scripted = ["+trainer=grpo", "env=counted", "policy=scripted", "policy.replies=[yes]"]
    with pytest.raises(UserError, match="Expected a policy whose model is in this process, got ScriptedPolicy"):
        ares_exp.run(scripted, config_dirs=[folder], quiet=True)
    with pytest.raises(UserError, match=r"`trainer\.heldout`: no task of the run is called 'peach'"):
        execute(model, folder, tmp_path / "run", "trainer.heldout=[peach]")
    with pytest.raises(UserError, match="at least one task to train on, got none: all are held out"):
        execute(model, folder, tmp_path / "run", f"trainer.heldout=[{','.join(TASKS)}]")
    assert not (tmp_path / "run").exists()


def test_contradictory_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="divide the rows of a step, 2 groups of 3 = 6, got 4"):
        Grpo(groups_per_step=2, group_size=3, batch_size=4)
    with pytest.raises(ConfigError, match="without what other keys decide, got max_steps"):
        Grpo(trl={"max_steps": 3})
