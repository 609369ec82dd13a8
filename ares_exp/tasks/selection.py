"""Selection of tasks from a set, by name or position (`env.tasks`, `env.exclude`, `env.limit`)."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from ares_exp.errors import ConfigError

_SHARD = re.compile(r"@([0-9]+)/([0-9]+)")
_SLICE = re.compile(r"([0-9]*):([0-9]*)(?::([0-9]*))?")
_POSITIONAL = re.compile(r"@.*|-?[0-9]+|[0-9:-]*:[0-9:-]*")

log = logging.getLogger(__name__)

SHOWN_NAMES = 20


class Named(Protocol):
    """An object with a name."""

    @property
    def name(self) -> str: ...  # noqa: D102


Item = TypeVar("Item")
T = TypeVar("T", bound=Named)
Entries = str | int | Sequence[str | int] | None


def parse_position(text: str) -> Callable[[Sequence[Item]], list[Item]]:
    """Parses an index `5`, a slice such as `0:10`, `5:` or `::2`, or a shard such as `@2/8`.

    `@2/8` is the third of eight shards, because shards are counted from 0. A shard consists of consecutive items. The
    sizes of the shards differ by at most one item.

    Returns:
        A function that selects the items of a list. It raises `LookupError` if no item is selected.

    Raises:
        ValueError: The text is not a valid position, or contains a negative number.
    """
    if text.isascii() and text.isdecimal():
        return lambda items: _picked(items, slice(int(text), int(text) + 1), f"an index below {len(items)}, got {text}")
    if (match := _SLICE.fullmatch(text)) is not None:
        start, stop, step = (int(part) if part else None for part in match.groups())
        if step == 0:
            raise ValueError(f"expected a step of at least 1, got {text!r}")
        nothing = "a slice with at least one item, but the slice selects none of the {} items"
        return lambda items: _picked(items, slice(start, stop, step), nothing.format(len(items)))
    if (match := _SHARD.fullmatch(text)) is not None:
        index, count = map(int, match.groups())
        if index >= count:
            raise ValueError(f"expected a shard @i/n with i from 0 to n - 1, got {text!r}")
        return lambda items: _picked(
            items,
            slice(index * len(items) // count, (index + 1) * len(items) // count),
            f"at least {count} items for {count} shards, got {len(items)}",
        )
    raise ValueError(f"expected an index 5, a slice 0:10, or a shard @2/8, without negative numbers, got {text!r}")


def _picked(items: Sequence[Item], part: slice, expected: str) -> list[Item]:
    if not (picked := list(items[part])):
        raise LookupError(f"expected {expected}")
    return picked


def positions_of(tasks: Sequence[Named]) -> dict[str, int]:
    """Returns the position of each task in `tasks`, counted from 0, by the task's name."""
    return {task.name: index for index, task in enumerate(tasks)}


def select(
    tasks: Sequence[T],
    *,
    tasks_selector: Entries = None,
    exclude: str | Sequence[str] | None = None,
    limit: int | None = None,
    preset: str = "harbor",
) -> list[T]:
    """Returns the tasks that match an entry of `tasks_selector` and are not excluded, in the order of `tasks`.

    Args:
        tasks: All tasks of the set.
        tasks_selector: One or several entries: a name or shell-style glob (case-sensitive), or a position (see
            `parse_position`). If a task is named like a position, such as `5`, its name takes precedence. `None`
            selects all tasks.
        exclude: Names or globs of tasks to leave out. A glob without a match causes a warning.
        limit: Maximum number of tasks. Only the first `limit` selected tasks are returned.
        preset: Value of the option `env`, for messages.

    Raises:
        ConfigError: An entry is malformed or out of range, no entry matches a task, or no task is left. The message
            lists the existing tasks.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"Expected `env.limit` to be at least 1, got {limit}. Use env.limit=null for no limit.")
    if not tasks:
        raise ConfigError(f"Expected env={preset} to have tasks, found none. Set env.path to a folder of tasks.")
    if tasks_selector is not None and not (entries := _as_strings(tasks_selector)):
        raise ConfigError(
            f"Expected `env.tasks` to name tasks, got an empty list. Use env.tasks=null for all tasks of env={preset}."
        )
    picked = list(tasks) if tasks_selector is None else _union(tasks, entries, preset)
    globs = _as_strings(exclude)
    for glob in globs:
        if not any(fnmatchcase(task.name, glob) for task in tasks):
            log.warning("env.exclude: %r matches no task of env=%s.%s", glob, preset, _closest(tasks, [glob]))
    left = [task for task in picked if not any(fnmatchcase(task.name, glob) for glob in globs)]
    if not left:
        raise ConfigError(
            f"`env.exclude` {_quoted(globs)} excludes all {len(picked)} selected tasks. {_available(tasks, preset)}"
        )
    return left[:limit]


def _as_strings(entries: Entries) -> list[str]:
    if entries is None:
        return []
    return [str(entries)] if isinstance(entries, str | int) else [str(entry) for entry in entries]


def _union(tasks: Sequence[T], entries: Sequence[str], preset: str) -> list[T]:
    matches = {entry: _matching(tasks, entry, preset) for entry in entries}
    chosen = set().union(*matches.values())
    unmatched = [entry for entry, found in matches.items() if not found]
    if not chosen:
        raise ConfigError(
            f"Expected `env.tasks` to match a task, got {_quoted(unmatched)}.{_closest(tasks, unmatched)} "
            f"{_available(tasks, preset)}"
        )
    for entry in unmatched:
        log.warning("env.tasks: %r matches no task of env=%s.%s", entry, preset, _closest(tasks, [entry]))
    return [task for task in tasks if task.name in chosen]


def _matching(tasks: Sequence[T], entry: str, preset: str) -> set[str]:
    names = [task.name for task in tasks]
    if entry in names:
        return {entry}
    if _POSITIONAL.fullmatch(entry) is None:
        return {name for name in names if fnmatchcase(name, entry)}
    try:
        return set(parse_position(entry)(names))
    except (ValueError, LookupError) as error:
        raise ConfigError(f"`env.tasks` {entry!r}: {error}. {_available(tasks, preset)}") from None


def _closest(tasks: Sequence[T], entries: Sequence[str]) -> str:
    names = [task.name for task in tasks]
    close = [name for entry in entries for name in difflib.get_close_matches(entry, names, n=3)]
    return f" Did you mean {_quoted(close)}?" if close else ""


def _available(tasks: Sequence[T], preset: str) -> str:
    shown = ", ".join(f"{index} {task.name}" for index, task in enumerate(tasks[:SHOWN_NAMES]))
    more = f", and {len(tasks) - SHOWN_NAMES} more" if len(tasks) > SHOWN_NAMES else ""
    return f"env={preset} has {len(tasks)} tasks: {shown}{more}."


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(repr(text) for text in texts)
