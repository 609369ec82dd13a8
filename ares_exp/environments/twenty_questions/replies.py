"""Classification of the policy's replies as a question, a guess, or neither.

- A line `Guess: …` is a guess. A question of the form `Is it a …?` is a correct guess if the text after `Is it` is only
  a name of the hidden object. `Is it bigger than a cat?` and `Is it a cat or a dog?` are not guesses of a cat.
- Any other text is a question, unless it has several question marks.
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

_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*</think(?:ing)?>", re.S | re.I)
_GUESS = re.compile(r"^\W*(?:my |final )*(?:guess|answer)\W*:(.+)$", re.I | re.M)
_NAMING = re.compile(r"(?:^|[.,!]\s)\W*(?:is|could|might|would) it(?: be)? ([^?]+)\?*\W*$", re.I)
_ARTICLES = frozenset({"a", "an", "the", "some"})


@dataclass(frozen=True, slots=True)
class Reply:
    """A classified reply: a question, a guess, or neither.

    Attributes:
        question: Question to answer with yes or no; `None` if the reply is not a question.
        guess: The guessed name, including the name in a question such as `Is it a cat?` (`a cat`); `None` if the reply
            does not guess.
        problem: Reason why the reply is neither; otherwise empty.
    """

    question: str | None = None
    guess: str | None = None
    problem: str = ""


def parse_reply(reply: str) -> Reply:
    """Classifies a reply. Reasoning at its start (`<think>…</think>`) is ignored."""
    reply = _THOUGHTS.sub("", reply)
    if len(reply) > MAX_CHARS:
        return Reply(problem=f"it has {len(reply):,} characters, and at most {MAX_CHARS} are read")
    text = unicodedata.normalize("NFKC", reply).strip()
    if not any(char.isalnum() for char in text):
        return Reply(problem="it is empty")
    guesses, questions = _GUESS.findall(text), len(re.findall(r"\?+", _GUESS.sub("", text)))
    if len(guesses) + questions > 1:
        return Reply(problem="it has several questions or guesses, and one at a time is answered")
    if guesses:
        return Reply(guess=guesses[0])
    named = _NAMING.search(text)
    return Reply(question=text, guess=named[1] if named else None)


def is_one_of(said: str, names: Iterable[str]) -> bool:
    """Returns whether `said` equals one of the names, apart from the differences that the module lists."""
    key = _key(said)
    return bool(key) and key in {_key(name) for name in names}


def _key(name: str) -> str:
    """Returns a name without the differences that are ignored."""
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    letters = "".join(char for char in decomposed if not unicodedata.combining(char) and char not in "'’")
    words = re.findall(r"[^\W_]+", letters)
    joined = "".join(words[1:] if len(words) > 1 and words[0] in _ARTICLES else words)
    return joined[:-1] if len(joined) > 3 and joined.endswith("s") and not joined.endswith("ss") else joined
