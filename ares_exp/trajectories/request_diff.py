"""The comparison of a request from an agent with a recorded request.

Each message and each setting is equal, equal after normalising, or different. Normalisers replace values that change in
each run, such as times or process ids, by a placeholder (see `BUILT_IN`). Known secrets are masked, as in the records.
Resumed runs and branches use all built-in normalisers, and a replay uses the normalisers in its config. All three
also use the normalisers of the agent. `ares-exp compare` uses none.

An agent that is replayed from its journal gets the recorded times again. Its requests must therefore be exactly equal,
and only their digests are compared (`agents.runtime.call_identity`).

The origin of a request (`origin`) and the reasoning in its messages are not compared. The agent only repeats reasoning
that it received in recorded responses. Requests that came over HTTP are also equal if they have the same canonical form
(see `llms.canonical`).

A request repeats the conversation so far, so a changed message is also in all later requests. The change counts only in
the first step that contains it. Otherwise, one random number at the start would make all later steps different.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ares_exp.llms.request import REASONING_FIELDS
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.trajectories.records import StepRecord, conversation_of, deserialize_llm_request

MAX_CHARS = 1_000_000

_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"[0-2]\d:[0-5]\d(?::[0-6]\d(?:[.,]\d{1,9})?)?"
_ZONE = r"(?:Z|[+-]\d{2}:?\d{2}| UTC| GMT)"

BUILT_IN: dict[str, tuple[str, str]] = {
    # 2026-01-31T12:00:00.123Z, 2026-01-31 12:00; Sat Jan 31 12:00:00 UTC 2026;
    # Sat, 31 Jan 2026 12:00:00 +0000; Jan 31 12:00
    "timestamps": (
        rf"\b\d{{4}}-\d{{2}}-\d{{2}}[T ]{_CLOCK}(?: ?{_ZONE}\b)?"
        rf"|\b(?:{_DAY},? )?\d{{1,2}} {_MONTH} \d{{4}} {_CLOCK}(?: [AP]M)?(?: ?(?:[+-]\d{{4}}|[A-Z]{{3,5}}))?\b"
        rf"|\b(?:{_DAY} )?{_MONTH} {{1,2}}\d{{1,2}} {_CLOCK}(?: [AP]M)?(?: [A-Z]{{3,5}})?(?: \d{{4}})?\b",
        "<timestamp>",
    ),
    # 0.12s, 1.5 seconds, 340 ms, 0m0.012s; not whole seconds or minutes, which the request may be about
    "durations": (
        r"\b(?:\d+m ?)?\d+\.\d+ ?(?:s|sec|secs|seconds?|mins?|minutes?|hours?)\b"
        r"|\b\d+(?:\.\d+)? ?(?:ms|msecs?|milliseconds?|us|µs|microseconds?|ns|nanoseconds?)\b",
        "<duration>",
    ),
    # 0x7f3a5c0d1e20
    "memory_addresses": (r"\b0x[0-9a-fA-F]{8,16}\b", "<address>"),
    # pid 4711, PID=4711, line 1: 4711 Killed
    "pids": (
        r"(?i:\b(pg?id)(s?[ =:#]{1,3}))\d+\b|(?<=: )\s*\d+(?= (?:Killed|Terminated|Aborted|Segmentation fault)\b)",
        r"\1\2<pid>",
    ),
    # names from mktemp and Python's tempfile: /tmp/tmp.Xa81bQz0Lw, /tmp/tmpab12_xyz
    "temp_paths": (r"(?<=/)tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})\b", "<temp>"),
    # twelve hexadecimal digits: Docker's host name of a container
    "container_ids": (r"\b(?=[0-9a-f]{0,11}[a-f])(?=[a-f]{0,11}\d)[0-9a-f]{12}\b", "<container>"),
    # 2026-01-31, 31 Jan 2026, Jan 31, 2026
    "dates": (
        rf"\b\d{{4}}-\d{{2}}-\d{{2}}\b|\b\d{{1,2}} {_MONTH} \d{{4}}\b|\b{_MONTH} {{1,2}}\d{{1,2}},? \d{{4}}\b",
        "<date>",
    ),
    # 12:00:00, 12:00:00.123
    "times": (r"\b[0-2]?\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?\b", "<time>"),
    # seconds, milliseconds or nanoseconds since 1970, from 2017 to 2033
    "epochs": (r"\b1[5-9]\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?\b", "<epoch>"),
    "uuids": (r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "<uuid>"),
}  # fmt: skip


class UserNormaliser(BaseModel):
    """A user-defined normaliser, such as `{pattern: 'port [0-9]+', replacement: 'port <n>'}`.

    Attributes:
        pattern: A regular expression for Python's `re`. A pattern whose matching takes exponential time is not
            rejected.
        replacement: Text that replaces each match. A backslash followed by 1 inserts the first group of the pattern.
    """

    model_config = ConfigDict(extra="forbid")

    pattern: Annotated[str, Field(min_length=1, max_length=1000)]
    replacement: Annotated[str, Field(max_length=200)] = "<normalised>"

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            re.compile(self.pattern).sub(self.replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"invalid regular expression {self.pattern!r}, or invalid replacement for it: {error}"
            ) from None
        return self


@dataclass(frozen=True, slots=True)
class Normaliser:
    """A compiled pattern and its replacement. The name of a user-defined normaliser is its pattern."""

    name: str
    pattern: re.Pattern[str]
    replacement: str

    def __call__(self, text: str) -> str:
        """Returns the normalised text. Texts of one million characters or more are returned unchanged."""
        return self.pattern.sub(self.replacement, text) if len(text) < MAX_CHARS else text


def make_normalisers(declared: Sequence[str | UserNormaliser]) -> tuple[Normaliser, ...]:
    """Compiles built-in normalisers, given by name, and user-defined ones. Raises `ValueError` for an unknown name."""
    made: dict[str, tuple[str, str]] = {}
    for one in declared:
        if isinstance(one, UserNormaliser):
            made[one.pattern] = one.pattern, one.replacement
        elif one in BUILT_IN:
            made[one] = BUILT_IN[one]
        else:
            raise ValueError(f"there is no normaliser {one!r}. Use one of {', '.join(BUILT_IN)}")
    return compiled(made)


def with_own(own: Mapping[str, tuple[str, str]]) -> tuple[Normaliser, ...]:
    """Compiles `own`, the normalisers of an agent (see `compiled`), followed by the built-in normalisers."""
    return (*compiled(own), *compiled(BUILT_IN))


def compiled(own: Mapping[str, tuple[str, str]]) -> tuple[Normaliser, ...]:
    """Compiles normalisers. `own` maps the name of each normaliser to a pattern and a replacement."""
    return tuple(Normaliser(name, re.compile(pattern), replacement) for name, (pattern, replacement) in own.items())


def normalise(value: Any, normalisers: Iterable[Normaliser], used: set[str]) -> Any:
    """Normalises every string in a JSON value, and adds the names of the applied normalisers to `used`.

    Also masks known secrets, because they are masked in the recorded values.
    """
    if isinstance(value, str):
        value = mask_known_secrets(value)
        for normaliser in normalisers:
            if (changed := normaliser(value)) != value:
                used.add(normaliser.name)
                value = changed
        return value
    if isinstance(value, Mapping):
        return {key: normalise(item, normalisers, used) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [normalise(item, normalisers, used) for item in value]
    return value


SPELLING = "spelling"
"""Name in `StepComparison.normalisers` if requests are equal only in their canonical form (see `llms.canonical`)."""
DIFF_LINES = 12
LINE_CHARS = 160
COMPARED_LINES = 400
"""Maximum number of lines that `short_diff` compares, so that it stays fast for long texts."""


class Match(StrEnum):
    """The result of comparing a request with the recorded request. `StepComparison` describes the values."""

    EXACT = "exact"
    NORMALISED = "normalised"
    DIFFERENT = "different"
    NOT_REACHED = "not reached"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class StepComparison:
    """The result of comparing the request of one step with the recorded request.

    Attributes:
        step: Number of responses that the agent had received before this request; 0 for the first request.
        match: `exact`: equal except for known secrets. `normalised`: equal after normalising. `different`: not equal.
            `not reached`: the episode ended before this step. `extra`: the record has no request for this step.
        where: The first message or setting that differs, in words; `None` if the requests are exactly equal.
        normalisers: For `normalised`, the names of the normalisers that made the requests equal.
        diff: For `different`, the lines of a short diff of the message or setting in `where`, after normalising. `-`
            marks recorded text, and `+` marks current text.
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
        """Returns the JSON-ready form without empty fields."""
        data = {"step": self.step, "match": self.match.value, "where": self.where}
        more = {"normalisers": list(self.normalisers), "diff": list(self.diff)}
        return {key: value for key, value in {**data, **more}.items() if value not in (None, [])}


class RequestComparison:
    """Compares the requests of an episode with the recorded requests, in order. Reports each change only once."""

    def __init__(self, normalisers: Sequence[Normaliser] | None = None) -> None:
        self._normalisers = with_own({}) if normalisers is None else normalisers
        self._known: set[tuple[object, object]] = set()

    def compare(self, step: int, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> StepComparison:
        """Compares the request `asked` with the `recorded` one. Both have the form of `serialize_llm_request`."""
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
        """Returns whether two requests that came over HTTP have equal canonical forms after normalising."""
        if "origin" not in recorded or "origin" not in asked:
            return False
        from ares_exp.llms.canonical import canonical

        plain = functools.partial(normalise, normalisers=self._normalisers, used=set())
        old, new = (canonical(deserialize_llm_request(one), plain).fingerprint for one in (recorded, asked))
        return old == new


class Difference(NamedTuple):
    """The location of a difference, such as `message 3 (user)`, and the old and new text; `None` for a missing text."""

    where: str
    old: str | None
    new: str | None


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """Returns the first difference between two requests, which are not normalised; `None` if they are equal."""
    for where, was, has in _parts(old, new):
        if was != has:
            contents = _content(was), _content(has)
            if None in contents or contents[0] == contents[1]:  # the difference is not in the texts
                contents = _text(was), _text(has)
            return Difference(where, *contents)
    return None


def apart(was: str, now: str, *, width: int, before: int) -> tuple[int, str, str]:
    """Cuts two texts to excerpts of at most `width` characters that show their first difference.

    Each excerpt starts at most `before` characters before the difference. Returns the start index and both excerpts.
    """
    start = max(0, _first_difference(was, now) - before)
    return start, was[start : start + width], now[start : start + width]


def _parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, old value and new value of each message and setting. The value of a missing one is `None`."""
    for index, (was, has) in enumerate(zip_longest(compared_messages(old), compared_messages(new))):
        message = has if was is None else was
        role = message.get("role") if isinstance(message, Mapping) else None
        yield f"message {index} ({role})", was, has
    for name in sorted({*old, *new} - {"messages", "origin"}):
        yield f"`{name}`", old.get(name), new.get(name)


def compared_messages(request: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the messages of a request, without reasoning, which is not compared."""
    for message in request.get("messages", ()):
        has_some = isinstance(message, Mapping) and any(name in message for name in REASONING_FIELDS)
        if has_some and message.get("role") == "assistant":
            yield {name: value for name, value in message.items() if name not in REASONING_FIELDS}
        else:
            yield message


def _content(part: Any) -> str | None:
    """Returns the text of a message; `None` if `part` is not a message, or if its content is not a text."""
    content = part.get("content") if isinstance(part, Mapping) else None
    return content if isinstance(content, str) else None


def _text(part: Any) -> str | None:
    return None if part is None else str(dict(part) if isinstance(part, Mapping) else part)


def _key(value: Any) -> object:
    """Returns a hashable key for a value. Equal values have equal keys."""
    try:
        key = frozenset(value.items()) if isinstance(value, Mapping) else value
        hash(key)
    except TypeError:  # values such as tool calls or lists of parts
        return json.dumps(value, sort_keys=True, default=str)
    return key


def short_diff(old: Any, new: Any) -> tuple[str, ...]:
    """Returns the lines of a short diff between two values, near their first difference.

    It has one line of context, and at most `DIFF_LINES` lines of at most `LINE_CHARS` characters.
    """
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
        lines = [*lines[: DIFF_LINES - 1], f"… {len(lines) - DIFF_LINES + 1} more lines"]
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
    """Returns a line. If it is too long, returns an excerpt that contains the character at index `at`."""
    start = max(0, at - LINE_CHARS // 4) if len(line) >= LINE_CHARS else 0
    shown = line[start : start + LINE_CHARS - 2]
    return f"{'…' if start else ''}{shown}{'…' if len(line) > start + len(shown) else ''}"


MAX_COMPARISONS = 4_000_000
"""Limit on the number of old messages times the number of new messages. Above it, messages are not compared with each
other: all old messages are shown as removed, and all new messages as added."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestChange:
    """The difference between a request and an earlier request of the same conversation, for display.

    Attributes:
        base: Step of the earlier request; `None` for the first request of a conversation.
        is_previous: Whether no other request, of any conversation, came between the two requests.
        kept: Number of unchanged messages at the start.
        edits: The messages after the unchanged ones, in order: removed `("-", message)`, added `("+", message)` or
            unchanged `(" ", message)`.
        settings: Name, old value and new value of each setting that differs from the previous request of any
            conversation. The value of a missing setting is `None`.
    """

    base: int | None
    is_previous: bool
    kept: int
    edits: list[tuple[str, Message]]
    settings: list[tuple[str, Any, Any]]


def is_request(observation: Any) -> bool:
    """Returns whether an observation is a request from a code agent, that is, a mapping with a list of `messages`."""
    messages = observation.get("messages") if isinstance(observation, Mapping) else None
    return isinstance(messages, tuple) and all(isinstance(message, Mapping) for message in messages)


def request_change(steps: Sequence[StepRecord], number: int) -> RequestChange:
    """Returns how the request of the step at index `number` differs from an earlier request of its conversation.

    The earlier request is the latest one whose messages are the start of the new request. If there is none, it is the
    latest request of the conversation.
    """
    request = steps[number].observation or {}
    asked = [index for index in reversed(range(number)) if is_request(steps[index].observation)]
    last = (steps[asked[0]].observation or {}) if asked else {}
    names = [name for name in {**request, **last} if name != "messages" and last.get(name) != request.get(name)]
    settings = [(name, last.get(name), request.get(name)) for name in names]
    in_conversation = [
        index for index in asked if conversation_of(steps[index].observation or {}) == conversation_of(request)
    ]
    if not in_conversation:
        return RequestChange(None, False, 0, [("+", message) for message in request["messages"]], settings)
    base = in_conversation[0]
    for index in in_conversation:
        earlier = (steps[index].observation or {})["messages"]
        if earlier and request["messages"][: len(earlier)] == earlier:  # the conversation continues
            base = index
            break
    before = steps[base].observation or {}
    kept, edits = _edits(before["messages"], request["messages"])
    return RequestChange(base, base == asked[0], kept, edits, settings)


def _edits(before: Sequence[Message], now: Sequence[Message]) -> tuple[int, list[tuple[str, Message]]]:
    kept = 0
    while kept < min(len(before), len(now)) and before[kept] == now[kept]:
        kept += 1
    old, new = before[kept:], now[kept:]
    if len(old) * len(new) > MAX_COMPARISONS or not old or not new:
        return kept, [*(("-", message) for message in old), *(("+", message) for message in new)]
    edits: list[tuple[str, Message]] = []
    matcher = SequenceMatcher(None, [json.dumps(one) for one in old], [json.dumps(one) for one in new], autojunk=False)
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag == "equal":
            edits += [(" ", message) for message in new[new_from:new_to]]
        else:
            edits += [("-", message) for message in old[old_from:old_to]]
            edits += [("+", message) for message in new[new_from:new_to]]
    return kept, edits
