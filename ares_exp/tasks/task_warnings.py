"""Warnings about tasks. If many tasks have the same warning, it is reported once, with the number of these tasks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping

SHOWN_NAMES = 3
SHOWN_NUMBERS = 3
SHOWN_PROBLEMS = 10
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

logger = logging.getLogger(__name__)


class TaskWarnings:
    """Collects warnings about tasks, and merges similar warnings into one sentence.

    Two warnings are similar if they differ only in the task's name and in numbers, such as limits.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, list[tuple[str, str]]] = {}

    def add(self, task_name: str, sentences: Iterable[str]) -> None:
        """Adds warnings about a task. The sentences may start with the name of the task."""
        for sentence in sentences:
            text = sentence.removeprefix("Task ").removeprefix(f"{task_name}: ")
            kind = _NUMBER.sub("0", _nameless(text, task_name))
            self._kinds.setdefault(kind, []).append((task_name, text))

    def tell(self, report: Callable[[str], None], what: str = "tasks") -> None:
        """Passes the collected warnings to `report`, and removes them.

        `what` is the plural noun in the warnings, such as `tasks`. If a warning affects many tasks, it shows only the
        first names, and a log message contains all names.
        """
        kinds, self._kinds = self._kinds, {}
        for told in kinds.values():
            names = list(dict.fromkeys(name for name, _ in told))
            texts = list(dict.fromkeys(text for _, text in told))
            if len(names) == 1:
                for text in texts:
                    report(f"{names[0]}: {text}")
                continue
            shown, more = ", ".join(names[:SHOWN_NAMES]), len(names) - SHOWN_NAMES
            report(f"{len(names):,} {what}: {_joined(told)} ({shown}{f' and {more:,} more' if more > 0 else ''})")
            if more > 0:
                logger.info("%s: %s", _joined(told), ", ".join(names))


def refusal(problems: Mapping[str, str], selected: int) -> str:
    """Returns an error message with the problems of tasks.

    `problems` contains the problems by task name. If fewer than `selected` tasks have problems, the message also
    suggests the option that excludes these tasks.
    """
    shown = list(problems.values())[:SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"… and {len(problems) - len(shown)} more.")
    if len(problems) < selected:
        shown.append(f"To run the other tasks: env.exclude=[{','.join(list(problems)[:SHOWN_PROBLEMS])}].")
    return "\n".join(shown)


def _nameless(text: str, name: str) -> str:
    return re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "…", text)


def _joined(told: list[tuple[str, str]]) -> str:
    """Merges similar sentences into one sentence without task names. Differing numbers are shown as `60/120`."""
    texts = [_nameless(text, name) for name, text in told]
    numbers = [list(dict.fromkeys(column)) for column in zip(*map(_NUMBER.findall, texts), strict=True)]
    parts = _NUMBER.split(texts[0])
    shown = ["/".join(some[:SHOWN_NUMBERS]) + ("/…" if len(some) > SHOWN_NUMBERS else "") for some in numbers]
    return "".join(part + number for part, number in zip(parts, [*shown, ""], strict=True))
