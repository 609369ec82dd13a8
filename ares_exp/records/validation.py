"""Words for pydantic's errors about data from a file, and types that such data needs besides pydantic's own."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import InstanceOf

if TYPE_CHECKING:
    from pydantic import ValidationError

Text = InstanceOf[str]
"""A string that may contain lone surrogates, as models write them and file names have them; `str` refuses those."""

Table = InstanceOf[Mapping[str, Any]]
"""A JSON object whose content is not validated."""

MAX_MESSAGE_CHARS = 160
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_WORDS = {
    "Input should be an instance of str": "Input should be a string",
    "Input should be an instance of Mapping": "Input should be an object",
    "Extra inputs are not permitted": "Input should be absent",
}


def briefly(value: object) -> str:
    """Returns the beginning of a value from a file, without anything that a terminal would obey."""
    return ascii(value) if isinstance(value, float) else _REPR.repr(value)[:80]


def explain_validation(error: ValidationError, *, within: str | None = None) -> str:
    """Returns the first wrong field in words: its name, what was expected, what was found.

    Args:
        error: What pydantic raised.
        within: The name of what was validated, if that is a field itself.
    """
    item = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(map(str, item["loc"] if within is None else (within, *item["loc"]))) or "the whole"
    if item["type"] == "missing":
        return f"expected `{name}`, but it is missing"
    message = item["msg"].removeprefix("Value error, ")
    message = _WORDS.get(message, message)[:MAX_MESSAGE_CHARS]
    if message.startswith("Input should be "):
        return f"expected `{name}` to be {message.removeprefix('Input should be ')}, got {briefly(item['input'])}"
    return f"`{name}`: {message}, got {briefly(item['input'])}"
