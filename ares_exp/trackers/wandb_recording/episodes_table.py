"""The table of episodes in W&B: grows by increments, so that no row is logged twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.results import EpisodeResult
from ares_exp.secrets import mask_known_secrets

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

KEY = "episodes"
COLUMNS = (
    "episode_id", "task", "attempt", "retry", "reward", "outcome", "error", "num_steps", "prompt_tokens",
    "generated_tokens", "cost", "duration_sec", "trajectory",
)  # fmt: skip
INCREMENT = 8
"""An increment is due once an eighth of the logged rows waits: W&B shows the latest 100 increments of a table."""
MAX_ERROR = 1000
MAX_PAGES_BYTES = 256 * 2**20
"""Of one session: further rows have no page; the trajectories are in their artifact all the same."""


class EpisodesTable:
    """A `wandb.Table` that is logged in increments; rows that were logged are let go."""

    def __init__(self, run: wandb.Run, scratch: Path, *, pages: bool, earlier: Mapping[str, Any]) -> None:
        """Makes the table; logs nothing yet.

        Args:
            run: Gets it.
            scratch: Folder for files on their way to W&B.
            pages: Whether trajectories become pages.
            earlier: What `state` was when the run was recorded before.
        """
        import wandb

        self._run = run
        self._scratch = scratch
        self._pages_left = MAX_PAGES_BYTES if pages else 0
        self._rows = _count(earlier.get("rows"))
        self._table = wandb.Table(columns=[*COLUMNS], log_mode="INCREMENTAL")
        # W&B has no public way to go on with a table of a run that was not resumed online.
        paths = earlier.get("paths")
        self._table._previous_increments_paths = [str(path) for path in paths] if isinstance(paths, list) else []
        self._table._increment_num = len(self._table._previous_increments_paths)
        self._waiting: list[Path] = []
        self._waiting_rows = 0

    @property
    def rows(self) -> int:
        """How many rows were logged, in all sessions."""
        return self._rows

    @property
    def state(self) -> dict[str, Any]:
        """What is to be known to go on with the table: how many rows were logged, and where the increments are."""
        paths = [*(self._table._previous_increments_paths or ())]
        if self._table._artifact_target is not None:
            paths.append(str(self._table._get_artifact_entry_ref_url()))
        return {"rows": self._rows, "paths": paths}

    def add(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None) -> bool:
        """Adds a row; says whether an increment was logged."""
        error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
        self._table.add_data(
            result.episode_id,
            result.task_name,
            result.attempt,
            result.retry,
            result.reward,
            result.outcome.value,
            mask_known_secrets(error)[:MAX_ERROR],
            result.num_steps,
            result.prompt_tokens,
            result.generated_tokens,
            result.cost,
            result.duration_sec,
            None if trajectory is None else self._page(result.episode_id, trajectory),
        )
        self._waiting_rows += 1
        return self._waiting_rows >= max(1, self._rows // INCREMENT) and self.flush()

    def flush(self) -> bool:
        """Logs the rows that wait as an increment; says whether there were any."""
        if not self._waiting_rows:
            return False
        try:
            self._run.log({KEY: self._table})
        finally:
            self._clean_up()
        self._rows += self._waiting_rows
        for row in self._table.data[-self._waiting_rows :]:
            row.clear()  # W&B counts the rows, but looks no more at those that were logged
        self._waiting_rows = 0
        return True

    def _clean_up(self) -> None:
        """Removes files that W&B has its own copies of; one of its own would stay in the temporary directory."""
        for path in self._waiting:
            path.unlink(missing_ok=True)
        self._waiting.clear()
        target = self._table._artifact_target
        if target is not None and target.artifact._tmp_dir is not None:
            target.artifact._tmp_dir.cleanup()

    def _page(self, episode_id: str, trajectory: EpisodeTrajectory) -> wandb.Html | None:
        import wandb

        from ares_exp.trackers.wandb_recording.episode_page import episode_page

        if self._pages_left <= 0:
            return None
        page = episode_page(trajectory).encode(errors="backslashreplace")
        self._pages_left -= len(page)
        # A file of ours: W&B's own would lie in the temporary directory until the process ends.
        path = self._scratch / f"{self._rows + self._waiting_rows}.html"
        path.write_bytes(page)
        self._waiting.append(path)
        html = wandb.Html(str(path), inject=False)
        html.html = ""
        return html


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
