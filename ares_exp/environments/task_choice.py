"""The choice of an episode's task."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ares_exp.errors import ConfigError
from ares_exp.tasks.selection import Named

T = TypeVar("T", bound=Named)


def choose_task(tasks: Sequence[T], options: Mapping[str, Any], generator: random.Random) -> T:
    """Chooses the task that `options["task"]` names, by its name or its index; without that, `generator` draws one.

    Raises:
        ConfigError: No such task, or other options.
    """
    return tasks[choose_index([task.name for task in tasks], options, generator)]


def choose_index(names: Sequence[str], options: Mapping[str, Any], generator: random.Random) -> int:
    """Finds the index of the task that `options["task"]` names among `names`; see `choose_task`."""
    if unknown := sorted(options.keys() - {"task"}):
        raise ConfigError(f"Expected only the option `task` in reset(options=…), got also {unknown}.")
    wanted = options.get("task")
    if wanted is None:
        return generator.randrange(len(names))
    if isinstance(wanted, int) and 0 <= wanted < len(names):
        return wanted
    if wanted in names:
        return names.index(wanted)
    shown = ", ".join(names[:20])
    raise ConfigError(f"Expected a task's name or its index below {len(names)}, got {wanted!r}. Tasks: {shown}.")
