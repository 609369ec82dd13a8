"""Which task an episode plays."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.tasks.task import Task


def choose_task(tasks: Sequence[Task], options: Mapping[str, Any], generator: random.Random) -> Task:
    """The task that `options["task"]` names, by its name or its index; without that, one that `generator` draws.

    Raises:
        ConfigError: No such task, or other options.
    """
    if unknown := sorted(options.keys() - {"task"}):
        raise ConfigError(f"Expected only the option `task` in reset(options=…), got also {unknown}.")
    wanted = options.get("task")
    if wanted is None:
        return tasks[generator.randrange(len(tasks))]
    if isinstance(wanted, int) and 0 <= wanted < len(tasks):
        return tasks[wanted]
    for task in tasks:
        if task.name == wanted:
            return task
    names = ", ".join(task.name for task in tasks[:20])
    raise ConfigError(f"Expected a task's name or its index below {len(tasks)}, got {wanted!r}. Tasks: {names}.")
