"""Positions in a list, written as text: an index `5`, a slice `0:10`, a shard `@2/8`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_SHARD = re.compile(r"@([0-9]+)/([0-9]+)")
_INDEX = re.compile(r"[0-9]+")
_POSITIONAL = re.compile(r"@.*|-?[0-9]+|[0-9:-]*:[0-9:-]*")


@dataclass(frozen=True, slots=True)
class Index:
    """The item at `index`, counted from 0."""

    index: int

    def __call__(self, items: Sequence[T]) -> list[T]:
        """Picks it.

        Raises:
            IndexError: There are not so many.
        """
        if self.index >= len(items):
            raise IndexError(f"expected an index below {len(items)}, got {self.index}")
        return [items[self.index]]


@dataclass(frozen=True, slots=True)
class Slice:
    """The items from `start` to before `stop`, every `step`-th, as Python slices."""

    start: int | None
    stop: int | None
    step: int | None = None

    def __call__(self, items: Sequence[T]) -> list[T]:
        """Picks them.

        Raises:
            LookupError: There are none.
        """
        picked = list(items[self.start : self.stop : self.step])
        if not picked:
            raise LookupError(f"expected a slice that holds something, got none of {len(items)}")
        return picked


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count` runs of items whose lengths differ by at most one."""

    index: int
    count: int

    def __call__(self, items: Sequence[T]) -> list[T]:
        """Picks them.

        Raises:
            LookupError: The shard is empty: there are fewer items than shards.
        """
        size = len(items)
        picked = list(items[self.index * size // self.count : (self.index + 1) * size // self.count])
        if not picked:
            raise LookupError(f"expected at least {self.count} items for {self.count} shards, got {size}")
        return picked


Position = Index | Slice | Shard


def is_position(text: str) -> bool:
    """Whether `text` is meant as a position, well written or not, rather than as a name."""
    return _POSITIONAL.fullmatch(text) is not None


def parse_position(text: str) -> Position:
    """Parses an index `5`, a slice `0:10`, `5:`, `:10`, `::2`, or a shard `@2/8` (the third of eight).

    Raises:
        ValueError: It is none of these, or has a negative number.
    """
    parsers: tuple[Callable[[str], Position | None], ...] = (_shard, _index, _slice)
    position = next((found for parse in parsers if (found := parse(text)) is not None), None)
    if position is None:
        raise ValueError(f"expected an index 5, a slice 0:10, or a shard @2/8, none of it negative, got {text!r}")
    return position


def _index(text: str) -> Index | None:
    return Index(int(text)) if _INDEX.fullmatch(text) else None


def _slice(text: str) -> Slice | None:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part == "" or _INDEX.fullmatch(part) for part in parts):
        return None
    numbers = [int(part) if part else None for part in parts]
    if numbers[2:] == [0]:
        raise ValueError(f"expected a step of at least 1, got {text!r}")
    return Slice(*numbers)


def _shard(text: str) -> Shard | None:
    match = _SHARD.fullmatch(text)
    if match is None:
        return None
    index, count = int(match[1]), int(match[2])
    if index >= count:
        raise ValueError(f"expected a shard @i/n with i from 0 to n - 1, got {text!r}")
    return Shard(index, count)
