"""The bundled objects, what their facts answer, and how an answer of the oracle is read."""

from __future__ import annotations

import pytest

from ares_exp.environments.twenty_questions.game_oracle import (
    Answer,
    FactsOracle,
    HiddenObject,
    load_objects,
    oracle_request,
    parse_answer,
)
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.errors import ConfigError, PolicyError
from ares_exp.policies.policy import EpisodeSpec

BUNDLED = load_objects()


def test_the_bundled_objects_have_facts_that_tell_each_from_all_others() -> None:
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
        ("eagle", "Does it have fur or feathers?", Answer.YES),
        ("snake", "Does it have fur or feathers?", Answer.NO),
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
async def test_the_facts_answer(name: str, question: str, answer: Answer) -> None:
    [hidden] = [one for one in BUNDLED if one.name == name]
    said = await FactsOracle(BUNDLED).for_episode(EpisodeSpec(name))(oracle_request(hidden, question))
    assert parse_answer(said.text) is answer


def test_facts_about_an_unknown_object_are_missing() -> None:
    with pytest.raises(PolicyError, match="no facts about 'unicorn'"):
        FactsOracle(BUNDLED).for_episode(EpisodeSpec("unicorn"))


def test_a_request_contains_name_aliases_and_facts() -> None:
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
def test_an_answer_is_read(answer: Answer | None, texts: list[str]) -> None:
    assert {text: parse_answer(text) for text in texts} == dict.fromkeys(texts, answer)


def test_a_digest_depends_on_every_field() -> None:
    digests = {HiddenObject("cup", *rest).digest for rest in [(), (("mug",),), ((), ("mug",)), ((), ("holds tea",))]}
    assert len(digests) == 4


def test_selecting_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="env=twenty_questions has 60 tasks: 0 cat, 1 dog"):
        TwentyQuestionsEnvironments(tasks="unicorn").load(print)
