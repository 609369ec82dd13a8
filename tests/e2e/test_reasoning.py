"""The reasoning of a model, from the endpoint to every record of a run, and back to the endpoint where it wants it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ares_exp.trajectories import load
from tests.loopback_endpoint import Behaviour, LoopbackEndpoint, completion, json_body
from tests.warm_start import warm_command

pytestmark = [pytest.mark.local, pytest.mark.once]

LOOK = "```bash\nls\n```"
GREET = "```bash\necho 'Hello, harbor!' > /app/greeting.txt\n```"
SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
REPLIES = (LOOK, GREET, SUBMIT)
THOUGHTS = ("What is there?", "I write the greeting.", "That is all.")


def thinking(number: int) -> Behaviour:
    body = completion(REPLIES[number], reasoning_content=THOUGHTS[number])
    body["usage"] |= {"completion_tokens_details": {"reasoning_tokens": 3}}
    return json_body(body)


def command(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_command(), *words[1:]], cwd=here, capture_output=True, text=True, timeout=110, check=False
    )


def overrides(endpoint: LoopbackEndpoint, run_dir: str, *more: str) -> tuple[str, ...]:
    policy = ("policy=openai", "policy.model=m", f"policy.base_url={endpoint.url}", "policy.api_key_env=null")
    return ("ares_exp", "tracker=none", "env.tasks=write-greeting", *policy, f"hydra.run.dir={run_dir}", *more)


def ran(here: Path, endpoint: LoopbackEndpoint, run_dir: str, *more: str) -> None:
    endpoint.then(*map(thinking, range(3)))
    done = command(here, *overrides(endpoint, run_dir, *more))
    assert done.returncode == 0, done.stderr
    assert "reasoning" not in done.stdout + done.stderr, "nothing of it was lost"


def sent(endpoint: LoopbackEndpoint) -> list[list[Any]]:
    """The reasoning in the assistant's messages of each request."""
    bodies = [received.body["messages"] for received in endpoint.requests]
    return [[one.get("reasoning_content") for one in body if one["role"] == "assistant"] for body in bodies]


def thoughts(here: Path, run_dir: str) -> list[str]:
    [episode] = load(here / run_dir, outcome="completed").trajectories()
    pieces = [piece for step in episode.steps[1:] for piece in (step.action or {})["data"]]
    return [piece["thinking"] for piece in pieces if "thinking" in piece]


def test_reasoning_is_recorded_shown_exported_and_replayed(tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    ran(tmp_path, endpoint, "run")
    assert sent(endpoint) == [[], [None], [None, None]], "an endpoint that did not ask for it does not get it"
    assert thoughts(tmp_path, "run") == list(THOUGHTS)
    shown = command(tmp_path, "ares_exp", "show", "run/write-greeting").stdout
    assert "    thinking  (21 characters)\n      I write the greeting.\n" in shown
    assert "30 + 15 tokens (9 of reasoning)" in " ".join(shown.split())
    for out, to in (("atif", "atif"), ("a.parquet", "parquet"), ("a.jsonl", "jsonl")):
        assert command(tmp_path, "ares_exp", "export", "run", out, "--to", to).returncode == 0
    [path] = (tmp_path / "atif").iterdir()
    document = json.loads(path.read_text())
    assert [one["reasoning_content"] for one in document["steps"] if "reasoning_content" in one] == list(THOUGHTS)
    assert pq.read_table(tmp_path / "a.parquet").column("reasoning").to_pylist() == [None, *THOUGHTS]
    assert [*load(tmp_path / "a.jsonl").trajectories()] == [*load(tmp_path / "run").trajectories()]
    rows = rows_for_trainers(tmp_path, "none.jsonl")
    assert [one for one in rows[0]["messages"] if "reasoning_content" in one] == []
    rows = rows_for_trainers(tmp_path, "kept.jsonl", "--reasoning", "field")
    assert [one["reasoning_content"] for one in rows[0]["messages"] if one["role"] == "assistant"] == list(THOUGHTS)
    replayed = command(tmp_path, "ares_exp", "replay=run", "hydra.run.dir=replayed")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads((tmp_path / "replayed" / "replay.json").read_text())["score"] == 1.0
    assert thoughts(tmp_path, "replayed") == list(THOUGHTS)
    assert command(tmp_path, "ares_exp", "compare", "run/write", "replayed/write").returncode == 0


def rows_for_trainers(here: Path, out: str, *options: str) -> list[dict[str, Any]]:
    done = command(here, "ares_exp", "export", "run", out, "--to", "sft", *options)
    assert done.returncode == 0, done.stderr
    assert ("Left out: 3 blocks of reasoning" in done.stdout) is (not options)
    return [json.loads(line) for line in (here / out).read_text().splitlines()]


@pytest.mark.parametrize("snapshots", ["every_step", pytest.param("none", marks=pytest.mark.nightly)])
def test_branch_sends_back_earlier_reasoning(tmp_path: Path, endpoint: LoopbackEndpoint, snapshots: str) -> None:
    ran(tmp_path, endpoint, "run", f"snapshot={snapshots}", "policy.send_reasoning=true")
    assert sent(endpoint) == [[], [THOUGHTS[0]], list(THOUGHTS[:2])]
    endpoint.requests.clear()
    endpoint.then(thinking(2))
    branched = command(tmp_path, "ares_exp", "branch_from=run/write-greeting@2", "hydra.run.dir=branch")
    assert branched.returncode == 0, branched.stderr
    assert sent(endpoint) == [list(THOUGHTS[:2])]
