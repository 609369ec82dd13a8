"""Runs and commands beside the small runs of the fixtures, for the formats of the files that those do not have."""

from __future__ import annotations

import json
import shutil
from typing import Any

from tests.fixtures.small_runs import FINISHED, SUBMIT, SWEPT, Player, scripted
from tests.inventory.schemas import Files
from tests.loopback_endpoint import LoopbackEndpoint, json_body

COMMANDS_IN_JSON = {
    "ares_exp.list --json": ("ares_exp.list", "--json"),
    "ares_exp.list tasks --json": ("ares_exp.list", "tasks", "--json"),
    "ares_exp.compare --json": ("ares_exp.compare", "sweep", "--json"),
    "ares_exp.sweeps --json": ("ares_exp.sweeps", "sweep", "--json"),
}
"""Commands whose output is JSON, by what they are called in the inventory."""
CONVERTED = ("json", "jsonl", "parquet", "atif", "sft", "preference")

_ANSWER: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SUBMIT, "reasoning_content": "It is done."},
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {"token": "Done", "logprob": -0.1, "bytes": None, "top_logprobs": []},
                    {"token": ".", "logprob": -0.2, "bytes": None, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    },
}


def describe(player: Player, files: Files) -> None:
    """Plays the runs after those of `small_runs.play`, and takes the files of all into account."""
    folder = player.place
    for name in ("killed", "killed_with_snapshots", "killed_in_the_second_step"):
        shutil.copytree(folder / name, folder / f"{name}_and_resumed")
        player(f"resume={name}_and_resumed")
    player("resume=nim", "attempts=2")
    player(*scripted(FINISHED), "tracker=none", "env.limit=2", "retry.policy_error=1", "retry.base_sec=0.01",
           "hydra.run.dir=retried", code=1)  # fmt: skip
    player("-m", "tracker=none", *scripted(SWEPT), "step_limit=5,-1", "hydra.sweep.dir=refused", code=2)
    player("tracker=none", "env.path=tasks", "snapshot=every_step", "hydra.run.dir=steps")
    _chat(player)
    player("tracker=[wandb,jsonl,tensorboard]", "env.tasks=[write-greeting]", "hydra.run.dir=tracked",
           env={"WANDB_MODE": "offline"})  # fmt: skip
    for name in ("finished", "steps"):
        player(name, module="ares_exp.export_job")
    for form in CONVERTED:
        out = "converted/preference.jsonl" if form == "preference" else f"converted/{form}"
        out = "converted/sft.jsonl" if form == "sft" else out
        (folder / "converted").mkdir(exist_ok=True)
        player("convert", "finished", "chat", out, "--to", form, module="ares_exp.trajectories")
    shutil.copytree(folder / "killed", folder / "recovered")
    player("recover", "recovered", module="ares_exp.trajectories")
    for path in sorted(folder.iterdir()):
        if path.name not in ("plugin", "tasks"):
            files.add(path.name, path)
    for name, (module, *words) in COMMANDS_IN_JSON.items():
        files.add_value(f"output of {name}", json.loads(player(*words, module=module).stdout))


def _chat(player: Player) -> None:
    """A run that asks an endpoint, in whose answers is whatever is kept of one."""
    with LoopbackEndpoint(otherwise=json_body(_ANSWER)) as endpoint:
        player(
            "tracker=none",
            "env.tasks=[write-greeting]",
            "collector=[json,jsonl,parquet,atif]",
            "policy=chat_completions",
            "policy.model=m",
            f"policy.base_url={endpoint.url}",
            "policy.api_key_env=null",
            "policy.temperature=0.5",
            "policy.seed=episode",
            "policy.prices={m:{input_per_million_usd:1,output_per_million_usd:2}}",
            "hydra.run.dir=chat",
        )
