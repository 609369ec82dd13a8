"""Functions that mask secrets in texts and configs before they are written to disk or to logs.

A value is masked if its key is sensitive (such as `api_key`), if it contains the value of a sensitive environment
variable, or if it is the user part of a URL. Values of keys such as `api_key_env` (the location of a secret) and
`max_output_tokens` (a count) are not secrets. References such as `${OPENAI_API_KEY}` are also not masked.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ares_exp.records.terminal_text import one_line

SHOWN_CHARS = 160


class RepeatedWarnings(logging.Filter):
    """A log filter that shows only the first warning of each kind, and counts the others.

    Two warnings of a logger are of the same kind if `kind_of` returns the same text for both. Records of other levels,
    such as errors, are always shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[tuple[str, str], str] = {}
        self._more: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is shown. Counts a warning that is not shown."""
        if record.levelno != logging.WARNING:
            return True
        kind = record.name, record.__dict__.get("kind") or kind_of(record)
        if kind not in self._first:
            self._first[kind] = record.getMessage()
            return True
        self._more[kind] += 1
        return False

    def told(self) -> list[str]:
        """Returns one line per kind of hidden warning, with the number of hidden warnings. Resets these numbers."""
        more, self._more = self._more, Counter()
        first = {kind: one_line(self._first[kind], SHOWN_CHARS) for kind in more}
        return [f"{count:,} more warnings like this in run.log: {first[kind]}" for kind, count in more.items()]


def kind_of(record: logging.LogRecord) -> str:
    """Returns a text that is the same for all records of a kind: the message format, without the values.

    A format that starts with `%`, such as `%s: %s`, is too general to identify a kind. The text then also contains the
    first value, in which all numbers are replaced by 0.
    """
    template = str(record.msg)
    if not template.startswith("%"):
        return template
    first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return f"{template} {re.sub(r'[0-9]+', '0', str(first))}"


MASK = "***"

LEAST_CHARS = 8
"""Minimum length of a secret to be masked in any text, in characters. Shorter secrets may also be ordinary words."""

EPISODE_KEY_PREFIX = "ares-key-"
"""Prefix of the API keys with which third-party agents authenticate to the run. Each episode has its own key."""
_EPISODE_KEY = re.compile(rf"{EPISODE_KEY_PREFIX}[0-9a-f]{{48}}")
_EPISODE_KEY_BYTES = re.compile(_EPISODE_KEY.pattern.encode())

# fmt: off
_SECRET_WORDS = frozenset({"auth", "authorization", "bearer", "cookie", "cookies", "passwd", "pwd"})
_SECRET_PARTS = ("apikey", "credential", "passphrase", "password", "secret")
# A final `key` or `token` is a secret, unless the word before it gives it another meaning.
_OTHER_KEYS = frozenset({
    "cache", "dict", "foreign", "group", "index", "json", "metric", "primary", "public", "reward", "sort", "step",
    "task",
})
_OTHER_TOKENS = frozenset({"bos", "cls", "end", "eos", "mask", "pad", "per", "sep", "special", "start", "stop", "unk"})
# Final words of names such as `api_key_env` and `credentials_file`, whose values are locations of secrets.
_PLACES = frozenset({"dir", "env", "file", "name", "path", "sock", "url"})
# fmt: on

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_REFERENCE = re.compile(r"\$\{\w+\}|\$\w+")
_INLINE_KEY = re.compile(r"(?<![\w-])([\w-]+)['\"]?\s*[:=]")


@functools.lru_cache(maxsize=4096)  # called for every environment variable whenever the environment changes
def is_sensitive(key: str) -> bool:
    """Returns whether `key` is the name of a secret, such as `api_key` or `password`."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words or words[-1] in _PLACES:
        return False
    if not _SECRET_WORDS.isdisjoint(words) or any(part in key.lower() for part in _SECRET_PARTS):
        return True
    before = words[-2] if len(words) > 1 else ""
    return (words[-1] in {"key", "keys"} and before not in _OTHER_KEYS) or (
        words[-1] == "token" and before not in _OTHER_TOKENS
    )


def scrub(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a nested, JSON-ready config in which secrets are masked. Only strings can be secrets."""
    copy: dict[str, Any] = _scrub(config, False, _known_secrets())
    return copy


def masked(text: str, secrets: Iterable[str]) -> str:
    """Masks the given secrets in `text`."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def mask_known_secrets(text: str) -> str:
    """Masks the known secrets in `text`, also if they are encoded as JSON strings.

    These are API keys of episodes, values of sensitive environment variables, and values passed to `protect`.
    """
    if EPISODE_KEY_PREFIX in text:
        text = _EPISODE_KEY.sub(MASK, text)
    for secret in _known_secrets():
        text = text.replace(secret, MASK)
    return text


def mask_episode_keys(data: bytes) -> bytes:
    """Masks the API keys of episodes in `data`."""
    return _EPISODE_KEY_BYTES.sub(MASK.encode(), data)


class KnownSecrets:
    """The secrets that are known when this object is created, in a form for searching them in bytes.

    Attributes:
        longest: Length of the longest secret in bytes; 0 if there are no secrets.
    """

    def __init__(self) -> None:
        self._spellings = tuple(spelling.encode("utf-8", "surrogateescape") for spelling in _known_secrets())
        self.longest = max(map(len, self._spellings), default=0)

    def found_in(self, data: bytes) -> bool:
        """Returns whether `data` contains one of the secrets."""
        return any(spelling in data for spelling in self._spellings)


class SecretFilter(logging.Filter):
    """A log filter that masks secrets in messages and tracebacks: known secrets and those in `typed` (command line)."""

    def __init__(self, typed: Iterable[str] = ()) -> None:
        super().__init__()
        self._typed = tuple(typed)

    def filter(self, record: logging.LogRecord) -> bool:
        """Masks the secrets in a log record. Returns `True`, because every record is shown.

        Before that, stores the result of `kind_of` in `record.kind`, because the masked record no longer has the
        message format.
        """
        record.__dict__.setdefault("kind", kind_of(record))  # computed before the values become part of the text
        record.msg, record.args = self._mask(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = self._mask(logging.Formatter().formatException(record.exc_info))
        return True

    def _mask(self, text: str) -> str:
        return mask_known_secrets(masked(text, self._typed))


def typed_secrets(overrides: Iterable[str]) -> list[str]:
    """Returns the values of those `key=value` overrides that are secrets. Omits values with fewer than 4 characters."""
    values = [text.partition("=")[2].strip("'\"") for text in overrides if scrub_argv([text]) != [text]]
    return [value for value in values if len(value) >= 4]


def scrub_argv(argv: Iterable[str]) -> list[str]:
    """Returns a copy of command-line arguments in which secrets are masked."""
    known = _known_secrets()
    return [_scrub_argument(argument, known) for argument in argv]


def _scrub(value: Any, sensitive: bool, known: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _scrub(item, sensitive or is_sensitive(str(key)), known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(item, sensitive, known) for item in value]
    if not isinstance(value, str):
        return value
    if sensitive and value and not _REFERENCE.fullmatch(value):
        return MASK
    return _scrub_text(value, known)


def _scrub_text(text: str, known: tuple[str, ...]) -> str:
    return _URL_USER.sub(MASK, masked(text, known))


def _scrub_argument(argument: str, known: tuple[str, ...]) -> str:
    key, equals, value = argument.partition("=")
    if equals and (is_sensitive(key) or any(is_sensitive(inner) for inner in _INLINE_KEY.findall(value))):
        return f"{key}={MASK}"
    return _scrub_text(argument, known)


_protected: set[str] = set()
_known: tuple[tuple[int, Mapping[Any, Any]], tuple[str, ...]] = ((-1, {}), ())
"""Cache for `_known_secrets`: its key (number of protected values, and environment variables) and its result."""


def protect(values: Iterable[str]) -> None:
    """Treats `values` as secrets, so that they are masked in everything that this process writes from now on."""
    _protected.update(values)


def _known_secrets() -> tuple[str, ...]:
    """Returns protected values and values of sensitive environment variables, longest first. Omits short values.

    Also returns the form of each value in a JSON string. The result is cached until these values change, because this
    function is called for every written line.
    """
    global _known
    variables = getattr(os.environ, "_data", os.environ)  # comparing the undecoded variables takes half a microsecond
    if (len(_protected), variables) != _known[0]:
        now = len(_protected), dict(variables)
        # PWD is the working directory, not a password.
        named = (os.environ.get(name, "") for name in os.environ if name != "PWD" and is_sensitive(name))
        values = {value for value in {*_protected, *named} if len(value) >= LEAST_CHARS}
        spellings = values | {json.dumps(value)[1:-1] for value in values}
        _known = now, tuple(sorted(spellings, key=len, reverse=True))
    return _known[1]
