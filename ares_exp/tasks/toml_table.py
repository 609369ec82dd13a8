"""`TomlTable`: the validation of tables of task.toml, and the messages about mistakes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

REMEDY = "Correct the value, or remove the key to get its default."


def _not_nan(seconds: float) -> float:
    if math.isnan(seconds):
        raise ValueError("expected a number of seconds, got nan")
    return seconds


Seconds = Annotated[float, AfterValidator(_not_nan)]
"""A time in seconds. Zero, negative and infinite values are legal in the format."""

User = str | int
EnvVars = dict[str, str]


class TomlTable(BaseModel):
    """A table of task.toml.

    Numbers may be written as strings, strings never as numbers. Keys that the format does not know are ignored;
    they are kept background request so that `unknown_keys` can name them.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown_keys(self) -> list[str]:
        """Lists the dotted names of the unknown keys, here and below."""
        return [*(self.model_extra or {}), *_unknown_below(self)]


def _unknown_below(table: TomlTable) -> Iterator[str]:
    for name in type(table).model_fields:
        value = getattr(table, name)
        if isinstance(value, TomlTable):
            yield from (f"{name}.{key}" for key in value.unknown_keys())
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, TomlTable):
                    yield from (f"{name}[{index}].{key}" for key in item.unknown_keys())


def explain(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """Describes every wrong field: its name, the expected value, and the one found."""
    by_field: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        field = _field(item["loc"], raw, missing=item["type"] == "missing")
        by_field.setdefault(field, []).append(_expectation(item["type"], item["msg"], item["input"]))
    return "; ".join(f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in by_field.items())


def _field(location: Sequence[str | int], raw: object, *, missing: bool) -> str:
    """Spells the location as in the file; pydantic also appends names of union members, which are left out."""
    parts: list[str] = []
    for key in location:
        present = _holds(raw, key)
        if present or missing:
            parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
        if not present:
            break
        raw = raw[key]  # type: ignore[index]
    return "".join(parts).removeprefix(".") or "task.toml"


def _holds(container: object, key: str | int) -> bool:
    if isinstance(container, dict):
        return key in container
    return isinstance(container, list) and isinstance(key, int) and key < len(container)


def _expectation(kind: str, message: str, found: object) -> str:
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message.replace('Input should be', 'expected')}, got {reprlib.repr(found)} ({type(found).__name__})"
