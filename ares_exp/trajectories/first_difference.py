"""Where two requests of a code agent differ first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """One place in which two serialised requests differ.

    Attributes:
        where: In words: `message 3 (user)`, or the name of a setting.
        old, new: What each has there, as text; `None` where it has nothing.
    """

    where: str
    old: str | None
    new: str | None


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """The first difference between two requests as `serialize_llm_request` gives them; `None` when they are equal."""
    before, now = old.get("messages", ()), new.get("messages", ())
    for index, (was, has) in enumerate(zip_longest(before, now)):
        if was != has:
            role = (was if has is None else has).get("role")
            return Difference(f"message {index} ({role})", *_texts(was, has))
    for name in sorted((set(old) | set(new)) - {"messages"}):
        if (was := old.get(name)) != (has := new.get(name)):
            return Difference(f"`{name}`", None if was is None else str(was), None if has is None else str(has))
    return None


def _texts(was: Mapping[str, Any] | None, has: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """What two messages say; all of them where that is the same, so that the rest makes the difference."""
    if was is not None and has is not None and (old := _content(was)) != (new := _content(has)):
        return old, new
    return None if was is None else str(dict(was)), None if has is None else str(dict(has))


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else str(dict(message))
