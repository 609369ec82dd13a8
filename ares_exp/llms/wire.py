"""Functions that read JSON bodies of LLM APIs: parsing, checks of fields, and reports of lost content.

A `ResponseStream` assembles a streamed response into the body that the endpoint would have sent without streaming.
Converters can therefore read responses with and without streaming. The body also contains content of the stream that
this package does not know, so that the converter can report it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from abc import ABC, abstractmethod
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


# Streams


DONE = "[DONE]"
"""Data of the last event in chat-completions streams."""


class ResponseStream(ABC):
    """Assembles a streamed response. Call `add` with the data of each event until `is_complete` is set.

    Attributes:
        is_complete: Whether the last event was added.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._error: dict[str, Any] | None = None

    @property
    def may_end(self) -> bool:
        """Whether the response is complete if the stream ends now. Default: only after the last event."""
        return self.is_complete

    def add(self, data: str) -> None:
        """Adds the data of one server-sent event, a JSON text or `[DONE]`.

        Raises:
            WireFormatError: The event does not follow the wire format.
        """
        if data.strip() == DONE:
            self.is_complete = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise WireFormatError(f"Expected JSON in each event of a streamed response, got {shorten(data)}") from None
        self.read(typed(event, "an event", Mapping))

    def body(self) -> dict[str, Any]:
        """Returns the complete body, or the error of a failed response."""
        return {"error": self._error} if self._error is not None else self.assembled()

    @abstractmethod
    def read(self, event: Mapping[str, Any]) -> None:
        """Adds the parsed data of one event. `add` calls this method.

        Raises:
            WireFormatError: The event does not follow the wire format.
        """

    @abstractmethod
    def assembled(self) -> dict[str, Any]:
        """Returns the response body that results from the events so far."""

    def fail(self, error: Any) -> None:
        """Ends the response with an error. An error without a type becomes a server error."""
        fields = error if isinstance(error, Mapping) else {"message": str(error)}
        self._error = {"type": "server_error"} | {key: value for key, value in fields.items() if value is not None}
        self.is_complete = True


class EventReader:
    """Extracts the data of server-sent events from the bytes of a stream.

    Ignores names, ids and comments of events, because no supported API needs them. Also ignores an incomplete event at
    the end of the stream.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[str]:
        """Processes the next part of the stream. Yields the data of each event that is now complete."""
        first, *others = part.split(b"\n")
        self._line += first
        for line in others:
            yield from self._read(bytes(self._line))
            self._line = bytearray(line)

    def _read(self, line: bytes) -> Iterator[str]:
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            yield data.decode(errors="replace")
