"""Keeps secrets off the disk and out of the logs: which names hold one, and how values are masked.

A value is masked when its key says that it is a secret, when it contains the value of an environment variable that
says so, or when it is the user part of a URL. What names the place of a secret (`api_key_env`), counts tokens
(`max_output_tokens`) or is a plain reference (`${OPENAI_API_KEY}`) is no secret and stays.
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

SHOWN_CHARS = 160


class RepeatedWarnings(logging.Filter):
    """Lets the first warning of each kind pass, and counts the others. Errors always pass.

    Two warnings are of one kind if they were logged with the same words around their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[tuple[str, str], str] = {}
        self._more: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is to be shown."""
        if record.levelno != logging.WARNING:
            return True
        kind = record.name, record.__dict__.get("kind") or kind_of(record)
        if kind not in self._first:
            self._first[kind] = record.getMessage()
            return True
        self._more[kind] += 1
        return False

    def told(self) -> list[str]:
        """Returns a line for each kind that came again, and forgets the numbers."""
        more, self._more = self._more, Counter()
        return [f"{count:,} more like this in run.log: {_short(self._first[kind])}" for kind, count in more.items()]


def kind_of(record: logging.LogRecord) -> str:
    """Returns the words around the values of a record, or its first value if its text starts with one."""
    template = str(record.msg)
    if not template.startswith("%"):
        return template
    first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return f"{template} {re.sub(r'[0-9]+', '0', str(first))}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARS else f"{flat[:SHOWN_CHARS]}…"


MASK = "***"

LEAST_CHARS = 8
"""Length from which on a secret is masked wherever it stands: a shorter one would mask ordinary words."""

EPISODE_KEY_PREFIX = "ares-key-"
"""What the keys start with that agents of others are given. Each is of one episode, and is masked by its form."""
_EPISODE_KEY = re.compile(rf"{EPISODE_KEY_PREFIX}[0-9a-f]{{48}}")
_EPISODE_KEY_BYTES = re.compile(_EPISODE_KEY.pattern.encode())

# fmt: off
_SECRET_WORDS = frozenset({"auth", "authorization", "bearer", "cookie", "cookies", "passwd", "pwd"})
_SECRET_PARTS = ("apikey", "credential", "passphrase", "password", "secret")
# A lone `key` or `token` is a secret unless the word before it says which other kind it is.
_OTHER_KEYS = frozenset({
    "cache", "dict", "foreign", "group", "index", "json", "metric", "primary", "public", "reward", "sort", "step",
    "task",
})
_OTHER_TOKENS = frozenset({"bos", "cls", "end", "eos", "mask", "pad", "per", "sep", "special", "start", "stop", "unk"})
# `api_key_env`, `credentials_file`: the place of a secret.
_PLACES = frozenset({"dir", "env", "file", "name", "path", "sock", "url"})
# fmt: on

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_REFERENCE = re.compile(r"\$\{\w+\}|\$\w+")
_INLINE_KEY = re.compile(r"([\w-]+)['\"]?\s*[:=]")


@functools.lru_cache(maxsize=4096)  # asked for every variable of the environment, at every line that is written
def is_sensitive(key: str) -> bool:
    """Whether a value under `key` is treated as a secret."""
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
    """Copies a nested, JSON-ready config without secrets.

    Only strings are masked: numbers, booleans and `None` under a sensitive key are kept.
    """
    known = _known_secrets()
    return {str(key): _scrub(value, is_sensitive(str(key)), known) for key, value in config.items()}


def mask_known_secrets(text: str) -> str:
    """Masks keys of episodes, and the values of sensitive environment variables, in plain and in JSON spelling."""
    if EPISODE_KEY_PREFIX in text:
        text = _EPISODE_KEY.sub(MASK, text)
    for secret in _known_secrets():
        text = text.replace(secret, MASK)
        if (escaped := _in_json(secret)) != secret:
            text = text.replace(escaped, MASK)
    return text


def mask_episode_keys(data: bytes) -> bytes:
    """Masks the keys of episodes."""
    return _EPISODE_KEY_BYTES.sub(MASK.encode(), data)


class KnownSecrets:
    """The values that `mask_known_secrets` masks at this moment, for a search in bytes."""

    def __init__(self) -> None:
        spellings = {spelling for secret in _known_secrets() for spelling in (secret, _in_json(secret))}
        self._spellings = tuple(spelling.encode("utf-8", "surrogateescape") for spelling in sorted(spellings))
        self.longest = max(map(len, self._spellings), default=0)

    def found_in(self, data: bytes) -> bool:
        """Whether `data` contains one of them."""
        return any(spelling in data for spelling in self._spellings)


class SecretFilter(logging.Filter):
    """Masks secrets in log records, tracebacks included: those of the environment, and those that were typed."""

    def __init__(self, typed: Iterable[str] = ()) -> None:
        super().__init__()
        self._typed = tuple(typed)

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record in place, and keeps its kind as `record.kind`; every record passes."""
        record.__dict__.setdefault("kind", kind_of(record))  # before the values are part of the text
        record.msg, record.args = self._mask(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = self._mask(logging.Formatter().formatException(record.exc_info))
        return True

    def _mask(self, text: str) -> str:
        for secret in self._typed:
            text = text.replace(secret, MASK)
        return mask_known_secrets(text)


def typed_secrets(overrides: Iterable[str]) -> list[str]:
    """Values of the `key=value` overrides that look sensitive; very short ones would mask ordinary words."""
    values = [text.partition("=")[2].strip("'\"") for text in overrides if scrub_argv([text]) != [text]]
    return [value for value in values if len(value) >= 4]


def scrub_argv(argv: Iterable[str]) -> list[str]:
    """Copies command-line arguments with the values of sensitive `key=value` overrides masked."""
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
    for secret in known:
        text = text.replace(secret, MASK)
    return _URL_USER.sub(MASK, text)


def _scrub_argument(argument: str, known: tuple[str, ...]) -> str:
    key, equals, value = argument.partition("=")
    if equals and (is_sensitive(key) or any(is_sensitive(inner) for inner in _INLINE_KEY.findall(value))):
        return f"{key}={MASK}"
    return _scrub_text(argument, known)


@functools.lru_cache(maxsize=1024)
def _in_json(secret: str) -> str:
    return json.dumps(secret)[1:-1]


_protected: set[str] = set()
_known: tuple[tuple[int, Mapping[Any, Any]], tuple[str, ...]] = ((-1, {}), ())
"""Cache of the known secrets: number of protected values, environment, and the secrets found in them."""


def protect(values: Iterable[str]) -> None:
    """Has these values masked, from now on, in whatever this process writes to files and logs."""
    _protected.update(values)


def _known_secrets() -> tuple[str, ...]:
    """Returns protected and sensitive values, longest first; leaves out short ones, which would mask ordinary words.

    Cached until the environment changes, because every written line calls it.
    """
    global _known
    variables = getattr(os.environ, "_data", os.environ)  # undecoded: to compare these takes half a microsecond
    before, secrets = _known
    if (len(_protected), variables) != before:
        now = len(_protected), dict(variables)
        secrets = _look_for_secrets()
        _known = now, secrets
    return secrets


def _look_for_secrets() -> tuple[str, ...]:
    named = (os.environ.get(name, "") for name in os.environ if name != "PWD" and is_sensitive(name))  # the shell's PWD
    values = {*_protected, *named}
    return tuple(sorted((value for value in values if len(value) >= LEAST_CHARS), key=len, reverse=True))
