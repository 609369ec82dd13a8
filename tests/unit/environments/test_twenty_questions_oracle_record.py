"""What the oracle has said is on disk before it counts, and a try that goes on with an earlier one is told it again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import TimeStep
from ares_exp.environments.own_model import MAX_SAID_CHARS
from ares_exp.environments.twenty_questions.environment import TwentyQuestionsEnvironment
from ares_exp.environments.twenty_questions.game_oracle import HiddenObject
from ares_exp.errors import OracleResponseError, RefusalError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.policy import Policy
from ares_exp.records.environment_responses import MAX_BYTES, copy_responses, read_asked, recorded_usage
from ares_exp.records.results import EnvironmentUsage

ONE = EnvironmentUsage(10, 5, 0.25)
"""What one answer of the oracle below takes."""


class Saying(Policy):
    """An oracle that says one thing to everything, and counts how often."""

    def __init__(self, text: str) -> None:
        self.text, self.asked = text, list[str]()

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.asked.append(str(request.messages[0]["content"]))
        return LLMResponse.from_text(self.text, usage=Usage(10, 5), cost=0.25, model="m")


async def execute(files: Path, oracle: Policy, *questions: str, task: str = "cat") -> tuple[list[str], Any]:
    """A game in which so much is asked: what was answered, and the environment."""
    env = TwentyQuestionsEnvironment([HiddenObject(task)], oracle=oracle, output_dir=files)
    await env.reset()
    told = []
    for question in questions:
        step: TimeStep[LLMRequest] = await env.step(LLMResponse.from_text(question))
        assert step.observation is not None
        told.append(str(step.observation.messages[-1]["content"]).split(" (")[0])
    return told, env


def lines(files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files / "oracle.jsonl").read_text().splitlines()]


async def test_a_chain_of_tries_asks_nothing_twice(tmp_path: Path) -> None:
    first, second, third, fourth = (tmp_path / str(number) for number in range(4))
    _, env = await execute(first, Saying("yes"), "Is it old?", "Is it grey?", "Is it old?")
    assert env.report().environment_usage == ONE + ONE + ONE
    with (first / "oracle.jsonl").open("a") as file:
        file.write('{"task": "cat", "question": "Is it wet?", "said": ["y')  # its process died

    copy_responses(first, second)
    no = Saying("no")
    told, env = await execute(second, no, "Is it old?", "Is it grey?")
    assert (told, no.asked, env.report().environment_usage) == (["Yes.", "Yes."], [], EnvironmentUsage())

    copy_responses(second, third)  # which had not come to the third one again
    told, env = await execute(third, no, "Is it old?", "Is it grey?", "Is it old?", "Is it wet?")
    assert (told, no.asked) == (["Yes.", "Yes.", "Yes.", "No."], ["Is it wet?"])
    assert env.report().environment_usage == ONE

    copy_responses(third, fourth)
    unknown = Saying("don't know")
    told, _ = await execute(
        fourth, unknown, "Is it wet?", "Is it grey?", "Is it grey?", "Is it \ud83d?", "Is it \ud83d?"
    )
    assert told == ["No.", "Yes.", "I don't know.", "I don't know.", "I don't know."]
    assert unknown.asked == ["Is it grey?", "Is it \ud83d?", "Is it \ud83d?"], "each answer is given once"
    spent = [recorded_usage(files) for files in (first, second, third, fourth)]
    assert spent == [ONE + ONE + ONE, EnvironmentUsage(), ONE, ONE + ONE + ONE], "who asked has paid, nobody else"

    copy_responses(fourth, tmp_path / "5")
    told, _ = await execute(tmp_path / "5", no, "Is it \ud83d?", "Is it \ud83d?")
    assert told == ["I don't know."] * 2


async def test_what_is_written_is_there_before_it_counts_and_stays_short(tmp_path: Path) -> None:
    told, _ = await execute(tmp_path, Saying("yes, " + "x" * 400), "Is it old?")
    assert told == ["Yes."]
    with pytest.raises(OracleResponseError):
        await execute(tmp_path / "long", Saying("yes, " + "x" * 10**6), "Is it old?")
    [line] = lines(tmp_path / "long")
    assert [len(said) for said in line["said"]] == [MAX_SAID_CHARS] * 2
    assert (line["answer"], line["prompt_tokens"]) == (None, 20)


async def test_only_the_answers_of_an_earlier_try_of_the_game_are_given_again(tmp_path: Path) -> None:
    no = Saying("no")
    await execute(tmp_path / "a", Saying("yes"), "Is it old?")
    await execute(tmp_path / "a", no, "Is it old?")
    assert len(no.asked) == 1, "another game in the same directory"
    copy_responses(tmp_path / "a", tmp_path / "b")
    told, _ = await execute(tmp_path / "b", no, "Is it old?", task="dog")
    assert (told, len(no.asked)) == (["No."], 2)


async def test_an_answer_that_the_game_does_not_know_is_asked_for_again(tmp_path: Path) -> None:
    line = {**GOOD, **NUMBERS, "answer": "maybe", "taken_over": True}
    (tmp_path / "oracle.jsonl").write_text(f"{json.dumps(line)}\n")
    yes = Saying("yes")
    told, _ = await execute(tmp_path, yes, "Is it old?")
    assert (told, yes.asked) == (["Yes."], ["Is it old?"])


async def test_a_question_without_an_answer_is_asked_again(tmp_path: Path) -> None:
    class Refusing(Policy):
        async def __call__(self, request: LLMRequest) -> LLMResponse:
            refusal = RefusalError("no")
            refusal.response = LLMResponse.from_text("I won't", usage=Usage(10, 5), cost=0.25)
            raise refusal

    first, second = tmp_path / "1", tmp_path / "2"
    with pytest.raises(OracleResponseError, match="RefusalError"):
        await execute(first, Refusing(), "Is it old?")
    assert recorded_usage(first) == ONE, "the refusal is paid for"
    copy_responses(first, second)
    assert not second.exists()
    yes = Saying("yes")
    await execute(second, yes, "Is it old?")
    assert yes.asked == ["Is it old?"]


GOOD = {"task": "cat", "question": "Is it old?", "said": ["yes"], "answer": "yes", "model": None}
NUMBERS = {"prompt_tokens": 10, "generated_tokens": 5, "cost": 0.25, "sec": 1.0}


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"7",
        json.dumps({**GOOD, **NUMBERS, "answer": 7}).encode(),
        json.dumps({**GOOD, **NUMBERS, "prompt_tokens": -1}).encode(),
        json.dumps({**GOOD, **NUMBERS, "generated_tokens": 2**60}).encode(),
        json.dumps({**GOOD, **NUMBERS, "cost": float("nan")}).encode(),
        json.dumps({**GOOD, **NUMBERS, "cost": float("inf")}).encode(),
        json.dumps({**GOOD, **NUMBERS, "said": "yes"}).encode(),
        json.dumps(GOOD).encode(),
    ],
)
def test_a_record_is_used_up_to_what_is_none(tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps({**GOOD, **NUMBERS, "of a later version": [1]}).encode()
    (tmp_path / "oracle.jsonl").write_bytes(b"\n".join([good, line, good, b""]))
    assert recorded_usage(tmp_path) == ONE
    assert "oracle.jsonl is ignored from line 2 on" in caplog.text


def test_a_record_that_is_no_file_or_has_no_end(tmp_path: Path) -> None:
    assert read_asked(tmp_path) is None
    os.mkfifo(tmp_path / "oracle.jsonl")
    assert read_asked(tmp_path) is None
    with (tmp_path / "oracle.jsonl2").open("wb") as file:
        file.truncate(4 * MAX_BYTES)
    (tmp_path / "oracle.jsonl2").replace(tmp_path / "oracle.jsonl")
    assert read_asked(tmp_path) == []
    copy_responses(tmp_path, tmp_path / "own")
    assert not (tmp_path / "own").exists()


async def test_oracle_answer_without_record_is_not_applied(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.write_text("no folder")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        await execute(files, Saying("Yes"), "Is it alive?")
