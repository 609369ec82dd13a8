"""Reading and writing of JSON bodies: typed access whose errors name the field, and what to do about losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ares_exp.errors import WireFormatError as WireFormatError

SHOWN_CHARS = 300
Report = Callable[[str], None]


def check_keys(mapping: Mapping[str, Any], known: Iterable[str], where: str, lose: Report) -> None:
    """Reports to `lose` every field of `mapping` beside the `known` ones that says something."""
    for key in sorted(set(mapping).difference(known)):
        if mapping[key] not in (None, [], {}, ""):
            lose(f"`{key}` of the {where}, which has no counterpart here")


def on_loss(strict: bool, report: Report | None, error: type[WireFormatError] = WireFormatError) -> Report:
    """What is called with the name of something that cannot be carried; with `strict` it raises `error`."""

    def lose(what: str) -> None:
        if strict:
            raise error(f"Cannot carry {what}. Remove it, or accept the loss with strict=False.")
        message = f"Left out in conversion: {what}."
        report(message) if report else warnings.warn(message, UserWarning, stacklevel=3)

    return lose


def required(mapping: Mapping[str, Any], key: str, *types: type) -> Any:
    """The value under `key`, which must be there and of one of `types`."""
    if key not in mapping:
        raise WireFormatError(f"Expected a field `{key}`, got {shorten(mapping)}")
    return typed(mapping[key], key, *types)


def optional(mapping: Mapping[str, Any], key: str, *types: type) -> Any:
    """The value under `key`, of one of `types`; `None` when it is absent or null."""
    return None if mapping.get(key) is None else typed(mapping[key], key, *types)


def list_of(mapping: Mapping[str, Any], key: str, item: type) -> list[Any] | None:
    """The list under `key`, of items of type `item`; `None` when it is absent or null."""
    values = optional(mapping, key, list)
    return None if values is None else [typed(value, f"{key}[]", item) for value in values]


def typed(value: Any, name: str, *types: type) -> Any:
    """`value`, which must be of one of `types` (a bool is no number).

    Raises:
        WireFormatError: It is not; `name` says what it is called on the wire.
    """
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise WireFormatError(f"Expected `{name}` to be {expected}, got {type(value).__name__}: {shorten(value)}")
    return value


def shorten(value: Any) -> str:
    """What was got, for a message: at most `SHOWN_CHARS` of its characters."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"


def plain(value: Any) -> Any:
    """A copy of frozen JSON-like data as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
