"""What counts as a question, as a guess, and as a right one."""

from __future__ import annotations

import pytest

from ares_exp.environments.twenty_questions.replies import MAX_CHARS, is_one_of, parse_reply

NAMES = ("cat", "house cat")


@pytest.mark.parametrize(
    "reply",
    [
        "Guess: cat",
        "guess: A CAT!",
        "**Guess:** cat.",
        "My final guess: the cat",
        "Final answer: cat",
        "It purrs, it has fur.\nGuess: house-cat",
        "Guess: is it a cat?",
        "Is it a cat?",
        "is it the Cat ?",
        "So, is it a “cat”?",
        "I know! Is it a cat?",
        "Could it be a house cat?",
        "Are you thinking of a cat?",
        "Is the object a cat？",
        "Is it cats?",
        "<think>Is it a dog? No. Guess: dog?</think>\nGuess: cat",
        "Is it a cat",
        "A cat.",
        "HOUSECAT",
        "It's a cat!",
        "I think it is a cat.",
        "My guess is the cat",
    ],
)
def test_a_right_guess(reply: str) -> None:
    assert is_one_of(parse_reply(reply).guess or "", NAMES)


@pytest.mark.parametrize(
    "reply",
    [
        "Is it bigger than a cat?",
        "Is it a cat or a dog?",
        "Is it a cat, a dog, a cow, a horse?",
        "Is it a cat's toy?",
        "Does a cat chase it?",
        "Is it not a cat?",
        "Guess: cat, dog, cow, horse",
        "Guess: cat or dog",
        "Guess: not a cat",
        "cat dog cow horse bee",
        "Guess: a",
        "Guess: …",
        "Is it a caterpillar?",
    ],
)
def test_a_name_among_other_words_is_no_right_guess(reply: str) -> None:
    assert not is_one_of(parse_reply(reply).guess or "", NAMES)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "it is empty"),
        (" \n?…!", "it is empty"),
        ("Is it alive? Is it a cat?", "several questions"),
        ("Guess: cat\nGuess: dog", "several guesses"),
        ("Is it alive?\nGuess: cat", "a question and a guess"),
        ("Let me think about what this object could possibly be.", "neither asks something"),
        ("Guess: cat" + " " * MAX_CHARS, "510 characters"),
    ],
)
def test_what_is_neither(reply: str, reason: str) -> None:
    found = parse_reply(reply)
    assert (found.question, found.guess) == (None, None)
    assert reason in found.problem


@pytest.mark.parametrize("reply", ["Is it alive?", "Does it fly", "I see. Does it have legs??", "What is it?"])
def test_a_question_is_passed_on_as_it_is(reply: str) -> None:
    assert parse_reply(reply).question == reply


def test_names_of_other_alphabets_and_with_accents() -> None:
    assert is_one_of("a pinata", ["Piñata"])
    assert is_one_of("Rubik’s Cube", ["rubiks cube"])
    assert is_one_of("кошка", ["Кошка"])
    assert not is_one_of("собака", ["Кошка"])
    assert not is_one_of("glass", ["gla"])
    assert is_one_of("the", ["the"]), "an article alone is a name"
