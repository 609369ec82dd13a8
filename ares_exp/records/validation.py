"""Validation of data from files: field types for dataclasses, and readable messages for pydantic's errors.

Pydantic is imported only when the first object is validated, because its import is slow.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

T = TypeVar("T")

MAX_COUNT = 2**53
"""Maximum value of a recorded integer. Every integer up to this value can be represented as a float."""
MAX_NUMBER = 1e100
"""Maximum value of recorded numbers. With this limit, the numbers can be squared and summed without overflow."""


class Exact:
    """A field annotation that makes pydantic reject values of another JSON type instead of converting them."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema with which pydantic validates the field."""
        from pydantic_core import core_schema

        schema = handler(source)
        if source in (bool, int, float):
            return {**schema, "strict": True}
        is_instance = core_schema.is_instance_schema(str if source is str else Mapping)
        return core_schema.json_or_python_schema(json_schema=schema, python_schema=is_instance)


class Within:
    """A field annotation that makes pydantic reject numbers outside of a range, infinity and NaN."""

    def __init__(self, least: float, most: float) -> None:
        self._bounds = {"ge": least, "le": most}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema with which pydantic validates the field."""
        finite = {"allow_inf_nan": False} if source is float else {}
        return {**handler(source), **self._bounds, **finite}


Integer = Annotated[int, Exact(), Within(-MAX_COUNT, MAX_COUNT)]
Count = Annotated[int, Within(0, MAX_COUNT)]
Amount = Annotated[float, Within(-MAX_NUMBER, MAX_NUMBER)]
Text = Annotated[str, Exact()]
"""A string that may contain lone surrogates, which occur in model outputs but which pydantic's `str` rejects."""
Flag = Annotated[bool, Exact()]
Number = Annotated[float, Exact()]
Table = Annotated[Mapping[str, Any], Exact()]
"""A JSON object with any content."""

MAX_MESSAGE_CHARS = 160
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_WORDS = {
    "Input should be an instance of str": "Input should be a string",
    "Input should be an instance of Mapping": "Input should be an object",
    "Extra inputs are not permitted": "Input should be absent",
    "Unexpected keyword argument": "Input should be absent",
}


def validated(kind: type[T], data: Any) -> T:
    """Creates an object of the dataclass `kind` from JSON-ready data. Unknown fields are ignored.

    Raises:
        ValueError: A field is missing or invalid. The message names the field.
    """
    from pydantic import TypeAdapter, ValidationError

    if (adapter := _adapters.get(kind)) is None:
        adapter = _adapters[kind] = TypeAdapter(kind)
    try:
        made: T = adapter.validate_python(data)
    except ValidationError as error:
        raise ValueError(explain_validation(error)) from None
    return made


_adapters: dict[type, TypeAdapter[Any]] = {}


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def fields_of(record: Any, kind: type | None = None) -> dict[str, Any]:
    """Returns the fields of a dataclass instance as a dict, without copying their values.

    With `kind`, a base class of the instance, only returns the fields of this class.
    """
    return {name: getattr(record, name) for name in _field_names(kind or type(record))}


def briefly(value: object) -> str:
    """Returns a short representation of a value from a file for an error message, without control characters."""
    return ascii(value) if isinstance(value, float) else _REPR.repr(value)[:80]


def explain_validation(error: ValidationError, *, within: str | None = None) -> str:
    """Describes the first invalid field of a validation error: its name, the expected value and the actual value.

    If the validated value is itself a field of another object, `within` is the name of this field.
    """
    item = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(map(str, item["loc"] if within is None else (within, *item["loc"]))) or "the whole"
    if item["type"] == "missing":
        return f"expected `{name}`, but it is missing"
    message = item["msg"].removeprefix("Value error, ")
    message = _WORDS.get(message, message).replace(str(10**100), f"{MAX_NUMBER:g}")[:MAX_MESSAGE_CHARS]
    if message.startswith("Input should be "):
        return f"expected `{name}` to be {message.removeprefix('Input should be ')}, got {briefly(item['input'])}"
    return f"`{name}`: {message}, got {briefly(item['input'])}"
