"""Twenty questions: its objects, the reading of questions and guesses, and the record of the oracle."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import TimeStep
from ares_exp.environments.own_model import MAX_SAID_CHARS
from ares_exp.environments.twenty_questions import (
    MAX_CHARS,
    Answer,
    FactsOracle,
    HiddenObject,
    TwentyQuestionsEnvironment,
    TwentyQuestionsEnvironments,
    is_one_of,
    load_objects,
    oracle_request,
    parse_answer,
    parse_reply,
)
from ares_exp.errors import ConfigError, OracleResponseError, PolicyError, RefusalError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.records.environment_responses import MAX_BYTES, copy_responses, read_asked, recorded_usage
from ares_exp.records.results import EnvironmentUsage

BUNDLED = load_objects()


def test_bundled_objects_have_distinct_facts() -> None:
    assert len(BUNDLED) == 60
    assert all(len(one.facts) >= 3 for one in BUNDLED)
    assert len({one.facts for one in BUNDLED}) == 60
    names = [name.casefold() for one in BUNDLED for name in one.names]
    assert len(names) == len(set(names)), "a name of two objects"


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("cat", "Is it alive?", Answer.YES),
        ("candle", "Is it alive?", Answer.NO),
        ("cat", "Does it have four legs?", Answer.YES),
        ("eagle", "Does it have fur or feathers?", Answer.UNKNOWN),
        ("eagle", "Is it an animal that can fly?", Answer.YES),
        ("airplane", "Is it an animal that can fly?", Answer.NO),
        ("pencil", "Do you write with it?", Answer.YES),
        ("cat", "Is it a kitten?", Answer.YES),
        ("cat", "Is it a dog?", Answer.NO),
        ("cat", "Is it blue?", Answer.UNKNOWN),
        ("cat", "Is it a blue animal?", Answer.UNKNOWN),
        ("cat", "Isn't it alive?", Answer.UNKNOWN),
        ("cat", "Is it?", Answer.UNKNOWN),
    ],
)
async def test_facts_oracle_responds_from_facts(name: str, question: str, answer: Answer) -> None:
    [hidden] = [one for one in BUNDLED if one.name == name]
    said = await FactsOracle(BUNDLED).for_episode(EpisodeSpec(name))(oracle_request(hidden, question))
    assert parse_answer(said.text) is answer


def test_facts_about_an_unknown_object_are_missing() -> None:
    with pytest.raises(PolicyError, match="no facts about 'unicorn'"):
        FactsOracle(BUNDLED).for_episode(EpisodeSpec("unicorn"))


def test_request_contains_name_aliases_and_facts() -> None:
    request = oracle_request(HiddenObject("tea {pot}", ("pot", "kettle"), ("holds tea",)), "Is it?")
    assert "Hidden: tea {pot}\nAlso called: pot, kettle\nWhat is true of it:\n- holds tea\n" in request.system_prompt


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (Answer.YES, ["yes", "Yes.", "**YES**", "Yes, it has.", "Answer: yes", "yes\nas cats do"]),
        (Answer.UNKNOWN, ["don't know", "I don’t know.", "No idea", "Not sure", "Unknown.", "It depends."]),
        (None, ["", "nope", "Yes and no", "yes/no", "No one knows", "The cat says yes", "no " * 400]),
    ],
)
def test_oracle_response_is_parsed(answer: Answer | None, texts: list[str]) -> None:
    assert {text: parse_answer(text) for text in texts} == dict.fromkeys(texts, answer)


def test_digest_depends_on_every_field() -> None:
    digests = {HiddenObject("cup", *rest).digest for rest in [(), (("mug",),), ((), ("mug",)), ((), ("holds tea",))]}
    assert len(digests) == 4


def test_empty_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match="env=twenty_questions has 60 tasks: 0 cat, 1 dog"):
        TwentyQuestionsEnvironments(tasks="unicorn").load(print)


NAMES = ("cat", "house cat")


@pytest.mark.parametrize(
    "reply",
    [
        *("Guess: cat", "guess: A CAT!", "**Guess:** cat.", "My final guess: the cat", "Final answer: cat"),
        *("It purrs, it has fur.\nGuess: house-cat", "Is it a cat?", "is it the Cat ?", "Is it cats?", "Is it a cat"),
        *("So, is it a “cat”?", "I know! Is it a cat?", "Could it be a house cat?", "Is it a cat？"),
        "<think>Is it a dog? No. Guess: dog?</think>\nGuess: cat",
    ],
)
def test_correct_guess_is_recognized(reply: str) -> None:
    assert is_one_of(parse_reply(reply).guess or "", NAMES)


@pytest.mark.parametrize(
    "reply",
    [
        *("Is it bigger than a cat?", "Is it a cat or a dog?", "Is it a cat, a dog, a cow, a horse?"),
        *("Is it a cat's toy?", "Does a cat chase it?", "Is it not a cat?", "Guess: cat, dog, cow, horse"),
        *("Guess: cat or dog", "Guess: not a cat", "cat dog cow horse bee", "Guess: a", "Guess: …"),
        "Is it a caterpillar?",
    ],
)
def test_name_within_other_words_is_wrong(reply: str) -> None:
    assert not is_one_of(parse_reply(reply).guess or "", NAMES)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "it is empty"),
        (" \n?…!", "it is empty"),
        ("Is it alive? Is it a cat?", "several questions or guesses"),
        ("Guess: cat\nGuess: dog", "several questions or guesses"),
        ("Is it alive?\nGuess: cat", "several questions or guesses"),
        ("Guess: cat" + " " * MAX_CHARS, "510 characters"),
    ],
)
def test_unclear_reply_has_a_problem(reply: str, reason: str) -> None:
    found = parse_reply(reply)
    assert (found.question, found.guess) == (None, None)
    assert reason in found.problem


@pytest.mark.parametrize("reply", ["Is it alive?", "Does it fly", "I see. Does it have legs??", "What is it?"])
def test_question_is_passed_unchanged(reply: str) -> None:
    assert parse_reply(reply).question == reply


def test_names_ignore_accents_and_support_other_alphabets() -> None:
    assert is_one_of("a pinata", ["Piñata"])
    assert is_one_of("Rubik’s Cube", ["rubiks cube"])
    assert is_one_of("кошка", ["Кошка"])
    assert not is_one_of("собака", ["Кошка"])
    assert not is_one_of("glass", ["gla"])
    assert is_one_of("the", ["the"]), "an article alone is a name"


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
        told.append(str(step.observation.messages[-1]["content"]).split(" (")[0])
    return told, env


def lines(files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files / "oracle.jsonl").read_text().splitlines()]


async def test_resumed_episodes_repeat_no_oracle_calls(tmp_path: Path) -> None:
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


async def test_record_is_written_first_and_is_bounded(tmp_path: Path) -> None:
    told, _ = await execute(tmp_path, Saying("yes, " + "x" * 400), "Is it old?")
    assert told == ["Yes."]
    with pytest.raises(OracleResponseError):
        await execute(tmp_path / "long", Saying("yes, " + "x" * 10**6), "Is it old?")
    [line] = lines(tmp_path / "long")
    assert [len(said) for said in line["said"]] == [MAX_SAID_CHARS] * 2
    assert (line["answer"], line["prompt_tokens"]) == (None, 20)


async def test_only_earlier_attempts_provide_oracle_responses(tmp_path: Path) -> None:
    no = Saying("no")
    await execute(tmp_path / "a", Saying("yes"), "Is it old?")
    await execute(tmp_path / "a", no, "Is it old?")
    assert len(no.asked) == 1, "another game in the same directory"
    copy_responses(tmp_path / "a", tmp_path / "b")
    told, _ = await execute(tmp_path / "b", no, "Is it old?", task="dog")
    assert (told, len(no.asked)) == (["No."], 2)


async def test_unknown_recorded_response_is_requested_again(tmp_path: Path) -> None:
    line = {**GOOD, **NUMBERS, "answer": "maybe", "taken_over": True}
    (tmp_path / "oracle.jsonl").write_text(f"{json.dumps(line)}\n")
    yes = Saying("yes")
    told, _ = await execute(tmp_path, yes, "Is it old?")
    assert (told, yes.asked) == (["Yes."], ["Is it old?"])


async def test_question_without_response_is_asked_again(tmp_path: Path) -> None:
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
def test_record_is_used_until_first_invalid_line(tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps({**GOOD, **NUMBERS, "of a later version": [1]}).encode()
    (tmp_path / "oracle.jsonl").write_bytes(b"\n".join([good, line, good, b""]))
    assert recorded_usage(tmp_path) == ONE
    assert "oracle.jsonl: line 2 is invalid" in caplog.text


def test_irregular_or_endless_record_is_ignored(tmp_path: Path) -> None:
    assert read_asked(tmp_path) is None
    os.mkfifo(tmp_path / "oracle.jsonl")
    assert read_asked(tmp_path) is None
    with (tmp_path / "oracle.jsonl2").open("wb") as file:
        file.truncate(4 * MAX_BYTES)
    (tmp_path / "oracle.jsonl2").replace(tmp_path / "oracle.jsonl")
    assert read_asked(tmp_path) == []
    copy_responses(tmp_path, tmp_path / "own")
    assert not (tmp_path / "own").exists()


async def test_oracle_response_without_record_is_not_applied(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.write_text("no folder")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        await execute(files, Saying("Yes"), "Is it alive?")
