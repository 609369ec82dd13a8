"""The refusal of tasks that cannot be played: all of them in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ares_exp.errors import TaskError, UnsupportedTaskError
from ares_exp.tasks.selection import Named

SHOWN_REFUSALS = 10


T = TypeVar("T", bound=Named)


def refuse_together(tasks: Iterable[T], check: Callable[[T], object]) -> None:
    """Checks every task.

    Args:
        tasks: The tasks.
        check: Raises `TaskError` for one that cannot be played.

    Raises:
        UnsupportedTaskError: With every reason (the first ones, of many), and how to play the others.
    """
    refused: dict[str, str] = {}
    for task in tasks:
        try:
            check(task)
        except TaskError as error:
            refused[task.name] = str(error)
    if refused:
        shown = list(refused.values())[:SHOWN_REFUSALS]
        shown += [f"… and {len(refused) - len(shown)} more."] if len(refused) > len(shown) else []
        shown.append(f"To play the others: env.exclude=[{','.join(list(refused)[:SHOWN_REFUSALS])}].")
        raise UnsupportedTaskError("\n".join(shown))
