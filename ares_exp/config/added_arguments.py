"""Arguments that every option of a group has besides those of the class that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCORER = "scorer"
"""The group of scorers."""


@dataclass(frozen=True, slots=True)
class AddedArgument:
    """An argument that the run takes, not the class.

    Attributes:
        default: Its default.
        prose: What it means.
    """

    default: Any
    prose: str


ADDED_ARGUMENTS: Mapping[str, Mapping[str, AddedArgument]] = {
    "env": {
        "scorers": AddedArgument(
            None, "further scorers: functions `[package.module.function]`, or scorers by name (docs/scoring.md)"
        ),
        "verifier_weight": AddedArgument(1.0, "weight of the environment's own reward beside those of the scorers"),
    },
    SCORER: {
        "name": AddedArgument(None, "name of its rewards; null: the name of the function or class"),
        "weight": AddedArgument(1.0, "weight in the episode's reward; 0: recorded only"),
        "timeout_sec": AddedArgument(600.0, "bound on the scoring of one episode in seconds"),
    },
}
"""By group and name."""


def added_defaults(group: str) -> dict[str, Any]:
    """Returns the defaults of what a group's options have besides."""
    return {name: argument.default for name, argument in ADDED_ARGUMENTS.get(group, {}).items()}
