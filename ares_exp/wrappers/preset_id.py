"""`name`, `name:5`, `name:0:10`, `name:5:`, `name::10`, `name@2/8`: a preset, and which of its tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.errors import PresetError, PresetLookupError
from ares_exp.tasks.selection import parse_position

Selector = Callable[[Sequence[Any]], list[Any]]
"""Selects tasks of a preset, in order. Raises `LookupError` if none is left."""

RESERVED = ":@"
_ID = re.compile(
    r"(?P<name>[^:@]+)(?::(?P<position>[0-9]{1,18}|[0-9]{0,18}:[0-9]{0,18})|(?P<shard>@[0-9]{1,18}/[0-9]{1,18}))?"
)


@dataclass(frozen=True, slots=True)
class PresetId:
    """A preset's name and its selection of tasks.

    Attributes:
        name: Of the preset.
        position: An index `5`, a slice `0:10` or a shard `@2/8`; empty for every task.
    """

    name: str
    position: str = ""

    @classmethod
    def parse(cls, text: str) -> PresetId:
        """Takes the text apart.

        Raises:
            PresetError: The text has none of the forms above.
        """
        match = _ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise PresetError(
                f"Expected a preset `name`, one of its tasks `name:5`, a slice `name:0:10`, `name:5:` or `name::10`, "
                f"or a shard `name@2/8`, none of it negative, got {text!r:.200}."
            )
        found = cls(match["name"], match["position"] or match["shard"] or "")
        found._check()
        return found

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        """Selects the tasks; makes this object a `Selector`.

        Raises:
            PresetLookupError: An index out of range, or nothing left.
        """
        try:
            picked = parse_position(self.position)(tasks) if self.position else list(tasks)
        except LookupError as error:
            raise PresetLookupError(f"`{self}`: {error}.") from None
        if not picked:
            raise PresetLookupError(f"`{self}`: the preset has no tasks.")
        return picked

    def __str__(self) -> str:
        """Formats the id as it is written."""
        return f"{self.name}{'' if self.position[:1] in ('', '@') else ':'}{self.position}"

    def _check(self) -> None:
        try:
            if self.position:
                parse_position(self.position)
        except ValueError as error:
            raise PresetError(f"`{self}`: {error}.") from None
