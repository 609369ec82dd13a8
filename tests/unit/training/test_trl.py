"""A training by TRL through the rollout service: real steps of a tiny model, whose rewards rise."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.errors import UserError
from ares_exp.training.client import Client, Episode, Request
from ares_exp.training.toy import toy_model, toy_tokenizer, write_model
from ares_exp.training.trl import columns_of, generate
from tests.service_contract import served
from tests.tiny_model import largest_gap
from tests.unit.training.counted_tasks import options

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]  # there may be much beside it

REPLIES = ("yes indeed", "no way", "perhaps so")
STEPS = 12


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options(tmp_path / "options")


async def started(url: str, *arguments: str) -> asyncio.subprocess.Process:
    common = ("--max_steps", str(STEPS), "--learning_rate", "0.03", "--per_device_train_batch_size", "24")
    words = (*common, "--max_completion_length", "1", "--save_steps", "4", "--disable_tqdm", "True", *arguments)
    command = [sys.executable, "-m", "ares_exp.training.trl", "--url", url, "--model", "model", "--output_dir", "out"]
    return await asyncio.create_subprocess_exec(*command, *words, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def is_json(path: Path) -> bool:
    """Whether a file is completely written."""
    with contextlib.suppress(OSError, ValueError):
        json.loads(path.read_text())
        return True
    return False


def curve() -> list[float]:
    """The mean reward of each step of the newest checkpoint."""
    newest = max(Path("out").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [line["reward"] for line in history if "reward" in line]


async def test_killed_training_resumes_and_its_reward_rises() -> None:
    """The process is killed after the first checkpoint. Its rollouts still run when it starts again."""
    write_model(Path("model"), REPLIES)
    async with served(["concurrency=64"]) as caller:
        killed = await started(caller.url)
        while not is_json(Path("out/checkpoint-4/trainer_state.json")):
            assert killed.returncode is None
            await asyncio.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
        resumed = await started(caller.url)
        assert await resumed.wait() == 0
        async with Client(caller.url) as client:
            assert (await client.info()).version == str(STEPS - 1)
    rewards = curve()
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.4
    assert Path("out/model.safetensors").exists()


def episode(**more: Any) -> Episode:
    row = {"conversation": "main", "made": "clean", "ids": [1, 2, 3, 4], "mask": [0, 0, 1, 1], "prompt_tokens": 2}
    row |= {"logprobs": [0, 0, -0.5, -1.0], "steps": [0], "starts": [2], "versions": ["1"], "finish_reason": "stop"}
    made: dict[str, Any] = dict.fromkeys(Episode.model_fields)
    made |= {"cursor": 1, "rollout_id": "r1", "submission_id": "s1", "task": "apple", "attempt": 0, "losses": []}
    forked = {**row, "made": "forked", "ids": [1, 2, 8], "mask": [0, 0, 1], "logprobs": [0, 0, -0.2]}
    made |= {"state": "finished", "reward": 1.0, "rewards": {}, "trainable": True, "versions": ["1"]}
    made["rows"] = [forked, row]
    made |= {"times": dict.fromkeys(("queue", "start", "engine", "tools", "verify"), 0.0), "metadata": {}}
    return Episode.model_validate(made | {"encoding": "json", "tokens": {"prompt": 2, "sampled": 2}} | more)


def test_each_episode_is_one_row() -> None:
    """A forked episode gives its longest row, and a failed one a row without trained tokens."""
    error = {"stage": "agent", "type": "AgentError", "message": "broken", "transient": False}
    lost = {"state": "failed", "reward": None, "trainable": False, "rows": None, "error": error}
    columns = columns_of([episode(), episode(**lost)], pad=9)
    assert columns["prompt_ids"] == [[1, 2], [9]]
    assert columns["completion_ids"] == [[3, 4], [9]]
    assert columns["env_mask"] == [[1, 1], [0]]
    assert columns["logprobs"] == [[-0.5, -1.0], [0.0]]
    assert columns["episode_reward"] == [1.0, None]
    with pytest.raises(UserError, match=r"None of the 1 episodes has a reward\. The first error: AgentError: broken"):
        columns_of([episode(**lost)], pad=9)


def test_sampled_tokens_have_exact_logprobs() -> None:
    """In a batch of prompts of different lengths, one of which is longer than the context."""
    tokenizer = toy_tokenizer(REPLIES)
    model = toy_model(tokenizer)
    trainer: Any = SimpleNamespace(
        model=model,
        processing_class=tokenizer,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        state=SimpleNamespace(global_step=3),
    )
    facts: dict[str, Any] = {
        "request_id": "r",
        "rollout_id": "r",
        "sampling": {"temperature": 0.7, "max_tokens": 5},
        "deadline": 0,
    }
    requests = [Request(prompt_ids=[7] * length, **facts) for length in (4, 9, 5000, 1)]
    responses = generate(trainer, requests)
    assert (responses[2].ids, responses[2].stop, responses[2].version) == ([], "length", "3")
    rows: list[Any] = []
    for request, response in zip(requests, responses, strict=True):
        before = len(request.prompt_ids)
        mask, logprobs = [0] * before + [1] * len(response.ids), [0.0] * before + [*response.logprobs]
        rows.append(SimpleNamespace(ids=[*request.prompt_ids, *response.ids], mask=mask, logprobs=logprobs))
        assert len(response.ids) <= 5
        assert (response.stop == "stop") == (response.ids[-1:] == [tokenizer.eos_token_id])
    del rows[2]
    assert largest_gap(model, rows, temperature=0.7) < 1e-4
