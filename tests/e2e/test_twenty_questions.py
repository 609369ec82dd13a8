"""Twenty questions from the command line: no container, no code agent, and everything else as ever."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.trajectories import load
from tests.conftest import SECRET_FREE, Cli
from tests.loopback_endpoint import LoopbackEndpoint, respond, slow
from tests.warm_start import WarmProcess

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

GAME = ("env=twenty_questions", "tracker=none", "container=docker", "hydra.run.dir=run")
NO_ENGINE = {"DOCKER_HOST": "tcp://127.0.0.1:1"}
"""There is no engine there: nothing may ask for one."""


def rows(run: Path) -> dict[str, dict[str, Any]]:
    lines = (run / "episodes.jsonl").read_text().splitlines()
    return {row["task_name"]: row for row in map(json.loads, lines)}


def test_oracle_wins_every_game(cli: Cli, tmp_path: Path) -> None:
    done = cli(*GAME, "env.questions=1", "concurrency=20", env=NO_ENGINE)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "run")
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


QUESTIONS = ("Is it alive?", "Is it grey?", "Has it a trunk?", "Guess: elephant")


def both_models(body: dict[str, Any]) -> str:
    """The policy's and the oracle's replies, by who is asked and how far the game is."""
    if body["model"] == "knows":
        return "Yes, it is an elephant!"
    return QUESTIONS[sum(message["role"] == "assistant" for message in body["messages"])]


@pytest.fixture
def models() -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint(otherwise=respond(both_models)) as server:
        yield server


@pytest.mark.nightly
def test_killed_run_with_two_models_resumes(cli: Cli, tmp_path: Path, models: LoopbackEndpoint) -> None:
    at = [f"policy.base_url={models.url}", "policy.api_key_env=null", "policy.model=asks"]
    oracle = [f"env.oracle.base_url={models.url}", "env.oracle.api_key_env=null", "env.oracle.model=knows"]
    overrides = ["policy=openai", *at, "policy@env.oracle=openai", *oracle, "env.tasks=[elephant]"]
    models.then(*[respond(both_models)] * 3, slow(60))  # two questions; the second one's answer does not come
    models.arrived.clear()
    with WarmProcess([*GAME, *overrides], cwd=tmp_path, env=SECRET_FREE | NO_ENGINE) as process:
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
    found = [(line["answer"], line["prompt_tokens"], line["taken_over"]) for line in map(json.loads, lines)]
    assert found == [("yes", 10, True), ("yes", 10, False), ("yes", 10, False)]
    assert row["environment_usage"] == {"prompt_tokens": 20, "generated_tokens": 10, "cost": 0.0}
    totals = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (totals["environment_usage"]["prompt_tokens"], totals["prompt_tokens"]) == (30, 40), "all tries'"
    assert "the oracle: 45 tokens" in done.stdout
    assert "The oracle received 2 requests: 20 prompt tokens" in (tmp_path / "run" / "run.log").read_text()

    asked_before = len(models.requests)
    models.otherwise = respond("no")
    again = cli("replay=run", "hydra.run.dir=again", env=NO_ENGINE)
    assert again.returncode == 0, again.stderr
    assert {one.body["model"] for one in models.requests[asked_before:]} == {"knows"}, "the oracle is asked anew"
    assert '"+No. (19 left)"' in (tmp_path / "again" / "replay.json").read_text(), "and what differs is told"


def test_oracle_usage_counts_in_the_budget(cli: Cli, tmp_path: Path, models: LoopbackEndpoint) -> None:
    overrides = [
        f"{who}.{one}" for who in ("policy", "env.oracle") for one in (f"base_url={models.url}", "api_key_env=null")
    ]
    words = [*GAME, "policy=openai", "policy@env.oracle=openai", "env.tasks=[elephant]", *overrides]
    done = cli(*words, "policy.model=asks", "env.oracle.model=knows", "budget.tokens=40", env=NO_ENGINE)
    assert done.returncode == 1, done.stderr
    assert "The run's budget is used up: 45 tokens, budget.tokens=40" in done.stderr
    row = rows(tmp_path / "run")["elephant"]
    assert (row["outcome"], row["environment_usage"]["prompt_tokens"]) == ("cancelled", 10)
    assert cli("resume=run", "budget.tokens=1000", env=NO_ENGINE).returncode == 0
    questions = [str(one.body["messages"]) for one in models.requests if one.body["model"] == "knows"]
    assert questions.count(questions[0]) == 1
    assert len(set(questions)) == 3
