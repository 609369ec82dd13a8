"""Twenty questions from the command line: no container, no code agent, and everything else as ever."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.trajectories import load
from tests.conftest import SECRET_FREE, Cli
from tests.loopback_endpoint import LoopbackEndpoint, answer, slow

pytestmark = pytest.mark.once

GAME = ("env=twenty_questions", "tracker=none", "container=docker", "hydra.run.dir=run")
NO_ENGINE = {"DOCKER_HOST": "tcp://127.0.0.1:1"}
"""There is no engine there: nothing may ask for one."""


def rows(run: Path) -> dict[str, dict[str, Any]]:
    """The last row of each task."""
    lines = (run / "episodes.jsonl").read_text().splitlines()
    return {row["task_name"]: row for row in map(json.loads, lines)}


def test_the_oracle_wins_every_game_of_a_sweep(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", *GAME[:3], "hydra.sweep.dir=sweep", "env.questions=1,20", "concurrency=20", env=NO_ENGINE)
    assert done.returncode == 0, done.stderr
    for job in ("0", "1"):
        found = rows(tmp_path / "sweep" / job)
        assert len(found) == 60
        assert {(row["reward"], row["outcome"], row["num_steps"]) for row in found.values()} == {(1.0, "completed", 1)}


def test_scripted_replies_win_and_lose(cli: Cli, tmp_path: Path) -> None:
    replies = '{cat: ["Is it alive?", "Is it a cat?"], dog: ["Is it a cat?"]}'
    done = cli(
        *GAME,
        "env.tasks=[cat,dog]",
        "policy=scripted",
        f"policy.replies={replies}",
        "policy.repeat_last=true",
        "wrapper=sync",
        "collector=[json,jsonl]",
        env=NO_ENGINE,
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "run")
    assert {name: (row["reward"], row["outcome"], row["num_steps"]) for name, row in found.items()} == {
        "cat": (1.0, "completed", 2),
        "dog": (0.0, "truncated", 20),
    }
    assert found["dog"]["error"]["message"] == "limit reached: steps"
    assert {one.total_reward for one in load(tmp_path / "run")} == {0.0, 1.0}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["mean_reward"] == 0.5


def test_snapshots_are_refused_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    done = cli(*GAME, "snapshot=every_step", env=NO_ENGINE)
    assert done.returncode == 2
    assert "TwentyQuestionsEnvironments does not say" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


QUESTIONS = ("Is it alive?", "Is it grey?", "Has it a trunk?", "Guess: elephant")


def both_models(body: dict[str, Any]) -> str:
    """The policy's and the oracle's replies, by who is asked and how far the game is."""
    if body["model"] == "knows":
        return "Yes, it is an elephant!"
    return QUESTIONS[sum(message["role"] == "assistant" for message in body["messages"])]


@pytest.fixture
def models() -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint(otherwise=answer(both_models)) as server:
        yield server


def test_two_models_and_a_run_that_is_killed(cli: Cli, tmp_path: Path, models: LoopbackEndpoint) -> None:
    at = [f"policy.base_url={models.url}", "policy.api_key_env=null", "policy.model=asks"]
    oracle = [f"env.oracle.base_url={models.url}", "env.oracle.api_key_env=null", "env.oracle.model=knows"]
    overrides = ["policy=chat_completions", *at, "policy@env.oracle=chat_completions", *oracle, "env.tasks=[elephant]"]
    models.then(*[answer(both_models)] * 3, slow(60))  # two questions; the second one's answer does not come
    command = [sys.executable, "-m", "ares_exp", *GAME, *overrides]
    models.arrived.clear()
    with subprocess.Popen(
        command, cwd=tmp_path, env=SECRET_FREE | NO_ENGINE, stderr=subprocess.PIPE, text=True
    ) as process:
        while len(models.requests) < 4 and process.poll() is None:
            models.arrived.wait(5)
            models.arrived.clear()
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said

    done = cli("resume=run", env=NO_ENGINE)
    assert done.returncode == 0, done.stderr
    row = rows(tmp_path / "run")["elephant"]
    assert (row["reward"], row["num_steps"], row["replayed"]["steps"]) == (1.0, 4, 2)
    assert row["replayed"]["diverged_at"] is None
    asked = [one.body for one in models.requests if one.body["model"] == "asks"]
    assert len(asked) == 4, "no answer of the policy was paid for twice"
    assert "elephant" not in json.dumps(asked)
    assert (row["prompt_tokens"], row["generated_tokens"]) == (40, 20), "the policy's alone"
    lines = (tmp_path / "run" / "files" / row["episode_id"] / "oracle.jsonl").read_text().splitlines()
    assert [(line["answer"], line["prompt_tokens"]) for line in map(json.loads, lines)] == [("yes", 10)] * 3
    assert "The oracle was asked 3 times: 30 prompt tokens" in (tmp_path / "run" / "run.log").read_text()

    again = cli("replay=run", env=NO_ENGINE)
    assert again.returncode == 0, again.stderr
    assert len([one for one in models.requests if one.body["model"] == "asks"]) == 4
    branched = cli(f"branch_from=run/{row['episode_id']}@1", env=NO_ENGINE)
    assert branched.returncode == 2
    assert "TwentyQuestionsEnvironments have no `export_state`" in branched.stderr
