"""The results of a run that was played from Python."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.errors import UserError
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_summary import RunSummary

if TYPE_CHECKING:
    import pandas

    from ares_exp.trajectories.stored_episodes import StoredEpisodes


@dataclass(frozen=True)
class RunResults:
    """What a run adds up to. Printing it shows the table that the command prints.

    Attributes:
        run_dir: The run directory.
        summary: Totals, and every try of every attempt (`summary.results`).
    """

    run_dir: Path
    summary: RunSummary

    @property
    def rows(self) -> tuple[EpisodeResult, ...]:
        """The result of every attempt (the last try of each), by task and attempt."""
        return tuple(sorted(self.summary.final, key=lambda row: (row.task_name, row.attempt)))

    @property
    def mean_reward(self) -> float | None:
        """Mean over the attempts that have a reward; `None` when there are none."""
        return self.summary.mean_reward

    @property
    def complete(self) -> bool:
        """Whether every attempt that was asked for has a reward, and a row on disk."""
        return self.summary.complete

    @property
    def exit_code(self) -> int:
        """Exit code of the command for such a run: 0 when it is complete and nothing in it is broken."""
        return self.summary.exit_code

    def to_frame(self, *, tries: bool = False) -> pandas.DataFrame:
        """Returns a data frame with a row for each attempt; a reward that is missing is NaN.

        Columns are the fields of `EpisodeResult`; those with fields of their own become one column for each:
        `rewards.<key>`, `phase_sec.<phase>`, `error_type`, `error_message`, `limit`.

        Args:
            tries: Whether there is a row for every try, in the order in which they finished, instead of the last one.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError(
                "A data frame needs the package pandas: `pip install 'ares-exp[pandas]'`. Without it, `results.rows` "
                "has the same values."
            ) from None
        rows = [row.to_row() for row in (self.summary.results if tries else self.rows)]
        columns = dict.fromkeys(name for row in [_NO_ROW.to_row(), *rows] for name in row)
        return pandas.DataFrame(rows, columns=list(columns)).astype({"reward": "float64"})

    def trajectories(self) -> StoredEpisodes:
        """Returns the recorded episodes of the run, their steps left on disk.

        Raises:
            TrajectoryFormatError: Nothing was recorded that can be read (`collector=none`).
        """
        from ares_exp.trajectories.stored_episodes import load

        return load(self.run_dir)

    def __str__(self) -> str:
        from ares_exp.reports.summary import render_summary

        text = StringIO()
        render_summary(self.summary, run_dir=self.run_dir, stream=text)
        return text.getvalue().rstrip("\n")


_NO_ROW = EpisodeResult("", "", 0, 0, Outcome.CANCELLED, None)
"""A row without mappings: the columns that every data frame has."""
