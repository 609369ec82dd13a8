"""Replies of the policy, classified by their text as a question, a guess, or neither.

- A line `Guess: …` (or `Final answer: …`) is a guess; so are `My guess is …`, `I think it is …`, `It is …`, and a reply
  of at most five words that asks nothing (`A cat.`).
- Text with one question mark is a question; without one, if it starts as questions do (`Does it fly`). A question of
  the form `Is it a …?` names something: if this is the hidden object, the question was a guess. `Is it bigger than a
  cat?` and `Is it a cat or a dog?` name something else.
- The thoughts of a reasoning model, `<think>…</think>` at the start, are ignored.
- Everything else is neither: an empty reply, more than 500 characters, several questions, several guesses, both.

A guess is right if it equals one of the object's names, regardless of case, accents, punctuation, spaces, a leading
article or a final s. A list of names is never right.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CHARS = 500
MAX_WORDS_OF_A_NAME = 5

_THING = r"(?:it|this|that|the (?:object|answer|thing|word)|what you(?: a|')re thinking of)"
_GUESS_LINE = re.compile(
    r"^[\W_]*(?:(?:so|okay|ok|then)[\s,]+)?(?:my )?(?:final )?(?:guess|answer)(?: is)?\s*:\s*(.+)$", re.I | re.M
)
_STATEMENT = re.compile(
    r"^(?:(?:so|okay|ok|then|well)[\s,]+)?(?:"
    r"my (?:final )?(?:guess|answer) is(?: that)?(?: it(?:'s| is))?"
    rf"|i (?:would |'d )?(?:think|guess|believe|say)(?: that)?(?: {_THING}(?:'s| is| must be| might be| could be))?"
    rf"|{_THING}(?:'s| is| must be| might be| could be)"
    r")\s+(.+)$",
    re.I,
)
_NAMING = re.compile(
    rf"^(?:(?:so|okay|ok|then|well|and)[\s,]+)*(?:is|was|could|might|would|can) {_THING}(?: be)?\s+(.+)$"
    r"|^(?:(?:so|okay|ok|then|well|and)[\s,]+)*are you thinking of\s+(.+)$",
    re.I,
)
_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*</think(?:ing)?>", re.S | re.I)
_ASKS = re.compile(r"^(?:is|are|was|were|does|do|did|can|could|has|have|had|will|would|might|may|should)\s", re.I)
_ARTICLES = frozenset({"a", "an", "the", "some"})


@dataclass(frozen=True, slots=True)
class Reply:
    """A classified reply: a question, a guess, or neither.

    Attributes:
        question: Question to answer with yes or no; `None` if the reply is not a question.
        guess: Name of a guess, or the name that a question asks for (`Is it a cat?`: `a cat`).
        problem: Reason why the reply is neither; empty otherwise.
    """

    question: str | None = None
    guess: str | None = None
    problem: str = ""


def parse_reply(reply: str) -> Reply:
    """Classifies a reply without its leading thoughts (`<think>…</think>`)."""
    reply = _THOUGHTS.sub("", reply)
    if len(reply) > MAX_CHARS:
        return Reply(problem=f"it has {len(reply):,} characters, and at most {MAX_CHARS} are read")
    text = unicodedata.normalize("NFKC", reply).replace("’", "'").strip()
    if not any(char.isalnum() for char in text):
        return Reply(problem="it is empty")
    guesses = [match[1] for match in _GUESS_LINE.finditer(text)]
    questions = len(re.findall(r"\?+", _GUESS_LINE.sub("", text)))
    if len(guesses) + questions > 1:
        several = (
            "several questions" if not guesses else "several guesses" if not questions else "a question and a guess"
        )
        return Reply(problem=f"it has {several}, and one at a time is answered")
    if guesses:
        return Reply(guess=_named(guesses[0].rstrip("?")) or guesses[0])
    if questions:
        return Reply(question=text, guess=_named(_last_sentence(text.partition("?")[0])))
    if _ASKS.match(text):
        return Reply(question=text, guess=_named(text))
    if stated := _STATEMENT.match(_last_sentence(text)):
        return Reply(guess=stated[1])
    if len(text.split()) <= MAX_WORDS_OF_A_NAME:
        return Reply(guess=text)
    return Reply(problem="it neither asks something nor has a line that starts with “Guess:”")


def is_one_of(said: str, names: Iterable[str]) -> bool:
    """Returns whether `said` is one of the names, after the simplifications that the module describes."""
    key = _key(said)
    return bool(key) and key in {_key(name) for name in names}


def _last_sentence(text: str) -> str:
    """Returns the last sentence without surrounding marks."""
    sentences = [part for part in re.split(r"[.!:;\n]+(?:\s|$)", text) if any(char.isalnum() for char in part)]
    return sentences[-1].strip(" \t*_\"'“”`") if sentences else ""


def _named(sentence: str) -> str | None:
    match = _NAMING.match(sentence.rstrip(".! "))
    return None if match is None else match[1] or match[2]


def _key(name: str) -> str:
    """Removes the ignored parts of a name."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    letters = "".join(char for char in decomposed if not unicodedata.combining(char) and char not in "'’")
    words = re.findall(r"[^\W_]+", letters)
    while len(words) > 1 and words[0] in _ARTICLES:
        words = words[1:]
    joined = "".join(words)
    return joined[:-1] if len(joined) > 3 and joined.endswith("s") and not joined.endswith("ss") else joined
