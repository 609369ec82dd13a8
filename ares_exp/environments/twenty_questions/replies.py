"""Classification of the policy's replies as a question, a guess, or neither.

- A line `Guess: …` (or `Final answer: …`) is a guess. Sentences such as `My guess is …`, `I think it is …` and
  `It is …` are also guesses, and so is a reply of at most five words that is not a question (`A cat.`).
- A text with one question mark is a question. Without a question mark, it is a question if it starts like one
  (`Does it fly`). A question of the form `Is it a …?` is a correct guess if it names the hidden object. The text after
  `Is it` must be only the name, so `Is it bigger than a cat?` and `Is it a cat or a dog?` are not guesses of a cat.
- The reasoning of a model, `<think>…</think>` at the start, is ignored.
- Other replies are neither: an empty reply, more than 500 characters, several questions, several guesses, or both.

A guess is correct if it equals one of the object's names. Case, accents, punctuation, spaces, a leading article and a
final s are ignored. A list of names is never correct.
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
        guess: The guessed name, also of a question that asks for a name (`a cat` for `Is it a cat?`); `None` without.
        problem: Reason that the reply is neither; otherwise empty.
    """

    question: str | None = None
    guess: str | None = None
    problem: str = ""


def parse_reply(reply: str) -> Reply:
    """Classifies a reply. Reasoning at its start (`<think>…</think>`) is ignored."""
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
    """Returns whether `said` equals one of the names, apart from the differences that the module lists."""
    key = _key(said)
    return bool(key) and key in {_key(name) for name in names}


def _last_sentence(text: str) -> str:
    """Returns the last sentence, without quotation marks and emphasis around it."""
    sentences = [part for part in re.split(r"[.!:;\n]+(?:\s|$)", text) if any(char.isalnum() for char in part)]
    return sentences[-1].strip(" \t*_\"'“”`") if sentences else ""


def _named(sentence: str) -> str | None:
    match = _NAMING.match(sentence.rstrip(".! "))
    return None if match is None else match[1] or match[2]


def _key(name: str) -> str:
    """Returns a name in a form in which ignored differences are removed."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    letters = "".join(char for char in decomposed if not unicodedata.combining(char) and char not in "'’")
    words = re.findall(r"[^\W_]+", letters)
    while len(words) > 1 and words[0] in _ARTICLES:
        words = words[1:]
    joined = "".join(words)
    return joined[:-1] if len(joined) > 3 and joined.endswith("s") and not joined.endswith("ss") else joined
