"""Comparison of two requests of an agent: whether they are the same, and where they differ first.

One rule for resume, replay, branches and `ares-exp compare`: requests are compared message by message, setting by
setting, and each part is equal, equal after normalising (see `normalisers`; known secrets are masked, as they are in
what was recorded), or different. Resume and branches normalise what the clock, the kernel and random generators make; a
replay what its config says; `ares-exp compare` nothing. An agent that is run again against its journal is compared by
digests of the same parts (`agents.runtime.call_identity`), exactly: it is shown the recorded times.

Where a request came from (`origin`) is no part of what is compared, and neither is reasoning that an agent keeps in its
messages: it is the model's, as log-probabilities are, and an answer that is given again brings its own. Requests that
came over HTTP are also equal where they only spell the same in other ways (see `llms.canonical`).

A request repeats the conversation so far. A message that came out differently is therefore in all later requests, too:
it counts once, at the step where it first shows, so that one random number at the start does not hide that
everything after it is the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple

from ares_exp.llms.canonical import fingerprint
from ares_exp.llms.reasoning import REASONING_FIELDS
from ares_exp.trajectories.normalisers import BUILT_IN, Normaliser, make_normalisers, normalise
from ares_exp.trajectories.records import deserialize_llm_request

SPELLING = "spelling"
"""Stands among the normalisers for what is the same in canonical form."""
DIFF_LINES = 12
LINE_CHARS = 160
COMPARED_LINES = 400
"""Of what follows the first line that differs, so much is looked at for the diff."""


class Match(StrEnum):
    """How a step of an episode compares with the recorded one."""

    EXACT = "exact"
    NORMALISED = "normalised"
    DIFFERENT = "different"
    NOT_REACHED = "not reached"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One step: one request of the agent.

    Attributes:
        step: How many answers it had got before, so 0 is the first request.
        match: `exact`, but for known secrets; `normalised`: equal after normalising; `different`; `not reached`: the
            episode ended before; `extra`: nothing was recorded that it could be compared with.
        where: The first message or setting that differs, in words; `None` where none does.
        normalisers: Names of those that made it equal, for `normalised`.
        diff: Lines of a short diff of what `where` names, `-` recorded, `+` now, both normalised; for `different`.
    """

    step: int
    match: Match
    where: str | None = None
    normalisers: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether the requests are equal, exactly or after normalising."""
        return self.match in (Match.EXACT, Match.NORMALISED)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form; what does not apply is left out."""
        data = {"step": self.step, "match": self.match.value, "where": self.where}
        more = {"normalisers": list(self.normalisers), "diff": list(self.diff)}
        return {key: value for key, value in {**data, **more}.items() if value not in (None, [])}


@functools.cache
def _built_in() -> tuple[Normaliser, ...]:
    return make_normalisers(list(BUILT_IN))


class RequestComparison:
    """Compares the requests of one episode that is played again with the recorded ones, in order."""

    def __init__(self, normalisers: Sequence[Normaliser] | None = None) -> None:
        self._normalisers = _built_in() if normalisers is None else normalisers
        self._known: set[tuple[object, object]] = set()

    def compare(self, step: int, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> StepComparison:
        """Compares two requests as `serialize_llm_request` gives them."""
        equal: tuple[str, set[str]] | None = None
        different: tuple[str, tuple[str, ...]] | None = None
        for where, old, new in _parts(recorded, asked):
            if old is new or old == new or (key := (_key(old), _key(new))) in self._known:
                continue
            self._known.add(key)
            used: set[str] = set()
            was, now = (normalise(value, self._normalisers, used) for value in (old, new))
            if was != now:
                different = different or (where, short_diff(was, now))
            elif used:
                equal = (where, used) if equal is None else (equal[0], equal[1] | used)
        if different is not None and self._is_same_spelt_otherwise(recorded, asked):
            return StepComparison(step, Match.NORMALISED, different[0], normalisers=(SPELLING,))
        if different is not None:
            return StepComparison(step, Match.DIFFERENT, different[0], diff=different[1])
        if equal is not None:
            return StepComparison(step, Match.NORMALISED, equal[0], normalisers=tuple(sorted(equal[1])))
        return StepComparison(step, Match.EXACT)

    def _is_same_spelt_otherwise(self, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
        """Whether two requests that came over HTTP have the same canonical form, normalised."""
        if "origin" not in recorded or "origin" not in asked:
            return False
        old, new = (fingerprint(deserialize_llm_request(one), self._normalise) for one in (recorded, asked))
        return old == new

    def _normalise(self, message: Any) -> Any:
        return normalise(message, self._normalisers, set())


class Difference(NamedTuple):
    """One place in which two things that were recorded differ.

    Attributes:
        where: In words: `message 3 (user)`, or the name of a setting.
        old, new: What each has there, as text; `None` where it has nothing.
    """

    where: str
    old: str | None
    new: str | None


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """Returns the first difference between two requests, nothing normalised; `None` when they are equal."""
    for where, was, has in _parts(old, new):
        if was != has:
            contents = _content(was), _content(has)
            if None in contents or contents[0] == contents[1]:  # then all of it makes the difference
                contents = _text(was), _text(has)
            return Difference(where, *contents)
    return None


def apart(was: str, now: str, *, width: int, before: int) -> tuple[int, str, str]:
    """Returns where two texts part, and both from at most `before` characters earlier, `width` characters long."""
    start = max(0, _first_difference(was, now) - before)
    return start, was[start : start + width], now[start : start + width]


def _parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields messages and settings side by side: a name in words, the old one, the new one; `None` for none."""
    for index, (was, has) in enumerate(zip_longest(compared_messages(old), compared_messages(new))):
        message = has if was is None else was
        role = message.get("role") if isinstance(message, Mapping) else None
        yield f"message {index} ({role})", was, has
    for name in sorted({*old, *new} - {"messages", "origin"}):
        yield f"`{name}`", old.get(name), new.get(name)


def compared_messages(request: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the messages of a request without the reasoning in them."""
    for message in request.get("messages", ()):
        has_some = isinstance(message, Mapping) and any(name in message for name in REASONING_FIELDS)
        if has_some and message.get("role") == "assistant":
            yield {name: value for name, value in message.items() if name not in REASONING_FIELDS}
        else:
            yield message


def _content(part: Any) -> str | None:
    """Returns the text of a message; `None` of anything else."""
    content = part.get("content") if isinstance(part, Mapping) else None
    return content if isinstance(content, str) else None


def _text(part: Any) -> str | None:
    return None if part is None else str(dict(part) if isinstance(part, Mapping) else part)


def _key(value: Any) -> object:
    """Returns something hashable that is equal for equal values."""
    try:
        key = frozenset(value.items()) if isinstance(value, Mapping) else value
        hash(key)
    except TypeError:  # tool calls, pieces
        return json.dumps(value, sort_keys=True, default=str)
    return key


def short_diff(old: Any, new: Any) -> tuple[str, ...]:
    """Returns the differing lines, and one around them: few and short."""
    was, now = _lines(old), _lines(new)
    same = _first_difference(was, now)
    if same < min(len(was), len(now)):
        at = _first_difference(was[same], now[same])
        was[same], now[same] = _window(was[same], at), _window(now[same], at)
    start = max(0, same - 1)
    end = start + COMPARED_LINES
    diff = list(unified_diff(was[start:end], now[start:end], n=1, lineterm=""))[2:]  # without the names of files
    lines = [_window(line) for line in diff if not line.startswith("@@")]
    if len(lines) > DIFF_LINES:
        lines = [*lines[: DIFF_LINES - 1], f"… {len(lines) - DIFF_LINES + 1} lines more"]
    return tuple(lines)


def _first_difference(old: Sequence[str], new: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _lines(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, Mapping) and value.keys() == {"role", "content"} and isinstance(value["content"], str):
        value = value["content"]
    text: str = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
    return text.split("\n")


def _window(line: str, at: int = 0) -> str:
    """Returns a long line from a little before a character of it."""
    start = max(0, at - LINE_CHARS // 4) if len(line) >= LINE_CHARS else 0
    shown = line[start : start + LINE_CHARS - 2]
    return f"{'…' if start else ''}{shown}{'…' if len(line) > start + len(shown) else ''}"
