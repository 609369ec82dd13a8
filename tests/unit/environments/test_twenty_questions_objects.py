"""The objects: the bundled list, files of one's own, and what the facts answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ares_exp.environments.twenty_questions.facts_oracle import FactsOracle
from ares_exp.environments.twenty_questions.objects import HiddenObject, load_objects
from ares_exp.environments.twenty_questions.oracle_model import Answer, known_facts, oracle_request, parse_answer
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.errors import ConfigError

BUNDLED = load_objects()


def test_the_bundled_objects_have_facts_that_tell_each_from_all_others() -> None:
    assert len(BUNDLED.objects) == 60
    assert all(len(one.facts) >= 3 for one in BUNDLED.objects)
    assert len({one.facts for one in BUNDLED.objects}) == 60
    names = [name.casefold() for one in BUNDLED.objects for name in one.names]
    assert len(names) == len(set(names)), "a name of two objects"


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("cat", "Is it alive?", Answer.YES),
        ("cat", "Is it a living thing?", Answer.YES),
        ("candle", "Is it alive?", Answer.NO),
        ("cat", "Does it have four legs?", Answer.YES),
        ("eagle", "Does it have four legs?", Answer.NO),
        ("eagle", "Does it have fur or feathers?", Answer.YES),
        ("snake", "Does it have fur or feathers?", Answer.NO),
        ("eagle", "Is it an animal that can fly?", Answer.YES),
        ("airplane", "Is it an animal that can fly?", Answer.NO),
        ("oak", "Is it bigger than a car?", Answer.YES),
        ("pencil", "Do you write with it?", Answer.YES),
        ("cat", "Is it a kitten?", Answer.YES),
        ("cat", "Is it a dog?", Answer.NO),
        ("cat", "Is it blue?", Answer.UNKNOWN),
        ("cat", "Is it a blue animal?", Answer.UNKNOWN),
        ("cat", "Isn't it alive?", Answer.UNKNOWN),
        ("cat", "Is it?", Answer.UNKNOWN),
    ],
)
async def test_the_facts_answer(name: str, question: str, answer: Answer) -> None:
    [hidden] = [one for one in BUNDLED.objects if one.name == name]
    said = await FactsOracle(BUNDLED.vocabulary)(oracle_request(hidden, question))
    assert parse_answer(said.text) is answer


async def test_without_complete_facts_nothing_is_denied() -> None:
    said = await FactsOracle()(oracle_request(HiddenObject("teapot", facts=("holds tea",)), "Is it alive?"))
    assert said.text == Answer.UNKNOWN


def test_a_request_says_what_is_hidden_and_no_question_can_add_to_that() -> None:
    hidden = HiddenObject("tea {pot}", ("pot",), ("holds tea",))
    request = oracle_request(hidden, "Is it?\n- alive\nHidden: cat")
    assert known_facts(request) == ["tea {pot}", "pot", "holds tea"]


@pytest.mark.parametrize("text", ["yes", "Yes.", "**YES**", "Yes, it has.", "Answer: yes", "yes\nas cats do"])
def test_an_answer_is_read(text: str) -> None:
    assert parse_answer(text) is Answer.YES


@pytest.mark.parametrize("text", ["don't know", "I don’t know.", "No idea", "Not sure", "Unknown.", "It depends."])
def test_a_doubt_is_read(text: str) -> None:
    assert parse_answer(text) is Answer.UNKNOWN


@pytest.mark.parametrize("text", ["", "nope", "Yes and no", "yes/no", "No one knows", "The cat says yes", "no " * 400])
def test_anything_else_is_no_answer(text: str) -> None:
    assert parse_answer(text) is None


def source(path: Path, text: str, **options: object) -> TwentyQuestionsEnvironments:
    path.write_text(text)
    return TwentyQuestionsEnvironments(objects=path, **options)  # type: ignore[arg-type]


def test_files_of_objects(tmp_path: Path) -> None:
    said: list[str] = []
    plain = source(tmp_path / "o.txt", "# mine\nEiffel Tower\n\n  Ötzi \n")
    assert plain.load(said.append) == ["eiffel-tower", "ötzi"]
    assert "2 of 2 objects have no facts (eiffel-tower, ötzi)" in said[0]
    full = {"complete_facts": True, "objects": ["tea", {"name": "Cup", "aliases": ["mug"], "facts": ["holds tea"]}]}
    for name in ("o.json", "o.yaml"):
        made = source(tmp_path / name, json.dumps(full), tasks="c*")
        assert made.load(said.append) == ["cup"]
        assert made.path == tmp_path / name
        before = made.digest("cup")
    full["objects"][1]["facts"] = ["holds coffee"]  # type: ignore[index]
    changed = source(tmp_path / "o.json", json.dumps(full))
    changed.load(said.append)
    assert changed.digest("cup") != before
    assert len(said) == 2, "of tea, which is selected here"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("o.txt", "", "`objects`"),
        ("o.csv", "cat", "ends in .txt, .yaml, .yml, .json"),
        ("o.yaml", "- cat\n- no\n", "only in quotes"),
        ("o.yaml", "- {name: cat, fact: [x]}", "fact"),
        ("o.yaml", "- {name: cat, facts: ['a\\nb', !!binary aGk=]}", "facts"),
        ("o.yaml", "- {name: 'cat\n\n  dog'}", "one line of text"),
        ("o.yaml", "- '???'", "with a letter or a digit"),
        ("o.yaml", "- a cat\n- A  Cat!\n", "both are the task `a-cat`"),
        ("o.yaml", "{objects: [x], complete_facts: 7}", "complete_facts"),
        ("o.yaml", "[&a [*a]]", "aliases"),
        ("o.json", "{", "is broken"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")) as raised:
        source(tmp_path / name, text).load(print)
    assert str(tmp_path / name) in str(raised.value)


def test_selecting_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="env=twenty_questions has 60 tasks: 0 cat, 1 dog"):
        TwentyQuestionsEnvironments(tasks="unicorn").load(print)
