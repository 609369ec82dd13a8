"""Normalisers: replacements in compared texts of what differs at every playing.

Each is a regular expression and what it is replaced by. The built-in ones take what is the clock's, the kernel's or a
random generator's, and next to nothing else; a text of a million characters or more is compared as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ares_exp.records.secrets import mask_known_secrets

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
    # 0.12s, 1.5 seconds, 340 ms, 0m0.012s; not whole seconds and longer, which may be what was asked for
    "durations": (
        r"\b(?:\d+m ?)?\d+\.\d+ ?(?:s|sec|secs|seconds?|mins?|minutes?|hours?)\b"
        r"|\b\d+(?:\.\d+)? ?(?:ms|msecs?|milliseconds?|us|µs|microseconds?|ns|nanoseconds?)\b",
        "<duration>",
    ),
    # 0x7f3a5c0d1e20
    "memory_addresses": (r"\b0x[0-9a-fA-F]{8,16}\b", "<address>"),
    # pid 4711, PID=4711, line 1: 4711 Killed
    "pids": (
        r"(?i:\b(pid)(s?[ =:#]{1,3}))\d+\b|(?<=: )\s*\d+(?= (?:Killed|Terminated|Aborted|Segmentation fault)\b)",
        r"\1\2<pid>",
    ),
    # what mktemp and Python's tempfile make: /tmp/tmp.Xa81bQz0Lw, /tmp/tmpab12_xyz
    "temp_paths": (r"(?<=/)tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})\b", "<temp>"),
    # twelve hexadecimal digits, as Docker names a container's host
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
    """One of the user's own: `{pattern: 'port [0-9]+', replacement: 'port <n>'}`.

    Attributes:
        pattern: A regular expression as Python's `re` takes it. One that takes exponential time takes it.
        replacement: What its matches become; a backslash and 1 are its first group.
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
                f"expected a regular expression and its replacement, got {self.pattern!r}: {error}"
            ) from None
        return self


@dataclass(frozen=True, slots=True)
class Normaliser:
    """One of them, compiled. `name` is its own, or the pattern of one that has none."""

    name: str
    pattern: re.Pattern[str]
    replacement: str

    def __call__(self, text: str) -> str:
        """Returns the normalised text."""
        return self.pattern.sub(self.replacement, text) if len(text) < MAX_CHARS else text


def make_normalisers(declared: Sequence[str | UserNormaliser]) -> tuple[Normaliser, ...]:
    """Compiles them, in order.

    Raises:
        ValueError: There is no built-in one of some name.
    """
    made = []
    for one in declared:
        if isinstance(one, UserNormaliser):
            made.append(Normaliser(one.pattern, re.compile(one.pattern), one.replacement))
        elif one in BUILT_IN:
            made.append(Normaliser(one, re.compile(BUILT_IN[one][0]), BUILT_IN[one][1]))
        else:
            raise ValueError(f"there is no normaliser {one!r}; there are: {', '.join(BUILT_IN)}")
    return tuple(made)


def with_own(own: Mapping[str, tuple[str, str]]) -> tuple[Normaliser, ...]:
    """Compiles the built-in ones, and those of an agent."""
    return (*compiled(own), *make_normalisers(list(BUILT_IN)))


def compiled(own: Mapping[str, tuple[str, str]]) -> tuple[Normaliser, ...]:
    """Compiles those of an agent: name → pattern and replacement."""
    return tuple(Normaliser(name, re.compile(pattern), replacement) for name, (pattern, replacement) in own.items())


def normalise(value: Any, normalisers: Iterable[Normaliser], used: set[str]) -> Any:
    """Normalises every text in JSON-like `value`; `used` takes the names of normalisers that changed one.

    Known secrets are masked: in the recorded text they are.
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
