"""The subject of a report: a run, a sweep, or two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ares_exp.reports.run_payload import ShownRun


@dataclass(frozen=True, slots=True)
class Subject:
    """What a report shows.

    Attributes:
        path: The run or sweep; of two runs the first.
        runs: The runs, by what to call each.
        more: Payload beside the runs: `pair` or `sweep`.
        first_tasks: Tasks whose trajectories go first.
    """

    path: Path
    runs: Mapping[str, ShownRun]
    more: Mapping[str, Any] = field(default_factory=dict)
    first_tasks: Sequence[str] = ()

    @classmethod
    def of_run(cls, path: Path) -> Self:
        """Makes the subject of a run. Raises `ConfigError` if there is none at the path."""
        return cls(path, {str(path): ShownRun(path)})
