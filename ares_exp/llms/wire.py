"""Functions that read JSON bodies of LLM APIs: parsing, checks of fields, and reports of lost content."""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from ares_exp.errors import WireFormatError as WireFormatError

SHOWN_CHARS = 300
NUMBER = (int, float)

MAX_COUNT = 2**53
"""Maximum valid token count. Up to this number, a float represents every integer."""

MAX_DEPTH = 100
"""Maximum depth of nested lists and objects in a body. Tool schemas of real requests have fewer than 20 levels."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Report = Callable[[str], None]


class WarnOnce:
    """Logs warnings. If a message is repeated, logs it only once."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[str] = set()

    def __call__(self, message: str) -> None:
        """Logs the message, unless it was logged before."""
        if message not in self._logged:
            self._logged.add(message)
            self._logger.warning(message)


def check_keys(mapping: Mapping[str, Any], known: Iterable[str], where: str, lose: Report) -> None:
    """Calls `lose` with a description of every field of `mapping` that is not in `known`, except empty fields.

    `where` names the mapping in the description, for example `request`.
    """
    for key in sorted(set(mapping).difference(known)):
        if mapping[key] not in (None, [], {}, ""):
            lose(f"`{key}` of the {where}, which ares_exp does not support")


def on_loss(strict: bool, report: Report | None, error: type[WireFormatError] = WireFormatError) -> Report:
    """Returns the callback `lose`, which converters call with a description of content that they cannot convert.

    With `strict`, the callback raises `error`. Otherwise it warns, through `report` or with a `UserWarning`.
    """

    def lose(what: str) -> None:
        if strict:
            raise error(f"Cannot convert {what}. Remove it, or pass strict=False to leave it out.")
        message = f"Left out in conversion: {what}."
        report(message) if report is not None else warnings.warn(message, UserWarning, stacklevel=3)

    return lose


@contextmanager
def errors_as(kind: type[WireFormatError]) -> Iterator[None]:
    """Raises wire format errors of the `with` block as `kind`, to distinguish errors in requests and responses."""
    try:
        yield
    except WireFormatError as error:
        raise kind(str(error)) from None


def required(mapping: Mapping[str, Any], key: str, *types: type) -> Any:
    """Returns the value in the field `key`. Raises `WireFormatError` if it is missing or has none of the `types`."""
    if key not in mapping:
        raise WireFormatError(f"Expected a field `{key}`, got {shorten(mapping)}")
    return typed(mapping[key], key, *types)


def optional(mapping: Mapping[str, Any], key: str, *types: type) -> Any:
    """Returns the value in the field `key`, or `None` if it is missing or null.

    Raises `WireFormatError` if the value has none of the `types`.
    """
    return None if mapping.get(key) is None else typed(mapping[key], key, *types)


def count_of(mapping: Mapping[str, Any], key: str) -> int:
    """Returns the token count in the field `key`; 0 if the field is missing or null."""
    count: int = optional(mapping, key, int) or 0
    if not 0 <= count < MAX_COUNT:
        raise WireFormatError(f"Expected `{key}` to be a number of tokens from 0 to {MAX_COUNT}, got {shorten(count)}")
    return count


def list_of(mapping: Mapping[str, Any], key: str, item: type) -> list[Any] | None:
    """Returns the list in the field `key`, or `None` if it is missing or null.

    Raises `WireFormatError` if an item does not have the type `item`.
    """
    values = optional(mapping, key, list)
    return None if values is None else [typed(value, f"{key}[]", item) for value in values]


def typed(value: Any, name: str, *types: type) -> Any:
    """Checks that `value` has one of `types` and returns it. A bool does not count as a number.

    Raises:
        WireFormatError: `value` has a different type. The message contains `name`, the field's name in the body.
    """
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise WireFormatError(f"Expected `{name}` to be {expected}, got {type(value).__name__}: {shorten(value)}")
    return value


def refuse_constant(name: str) -> NoReturn:
    """Raises `ValueError` for `NaN` and infinities, as `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not a valid JSON number")


def parse_body(raw: bytes) -> Any:
    r"""Parses the JSON body of a request.

    Replaces unpaired surrogates (such as `\ud83d`), which occur where a client has cut a string, with U+FFFD.

    Raises:
        WireFormatError: The body is not JSON, is nested too deeply, or contains invalid numbers.
    """
    try:
        body = json.loads(raw, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireFormatError(f"Expected a JSON body, got {shorten(raw[:80])}: {error}") from None
    return _checked(body, bool(_SURROGATE.search(raw)))


def _checked(value: Any, mend: bool, depth: int = 0) -> Any:
    """Returns `value` after checking its depth and numbers. If `mend` is set, replaces unpaired surrogates."""
    if depth > MAX_DEPTH:
        raise WireFormatError(f"Expected JSON with at most {MAX_DEPTH} levels of nesting, got more levels")
    if isinstance(value, dict):
        return {_whole(key) if mend else key: _checked(item, mend, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, mend, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise WireFormatError(f"Expected numbers that fit into a 64-bit float, got {value}")
    return _whole(value) if mend and isinstance(value, str) else value


def _whole(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shorten(value: Any) -> str:
    """Returns `repr(value)` for a message. A long result is truncated after `SHOWN_CHARS` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"


def plain(value: Any) -> Any:
    """Returns a deep copy of JSON-like data. Immutable messages and lists become plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
