"""The table of episodes in W&B: a row for each finished attempt or retry, with a readable page of its trajectory."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.records.results import EpisodeResult, reward_names
from ares_exp.records.secrets import mask_known_secrets

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

KEY = "episodes"
COLUMNS = (
    "episode_id", "task", "attempt", "retry", "reward", "outcome", "error", "num_steps", "prompt_tokens",
    "generated_tokens", "cost", "duration_sec", "trajectory",
)  # fmt: skip
MAX_ERROR = 1000
MAX_REWARDS = 16
"""Further rewards by name have no column; they are in the rows of the run."""
MAX_PAGES_BYTES = 128 * 2**20
"""Further episodes have no page; their trajectories are in the artifact all the same."""


class EpisodePages:
    """The pages of a run's trajectories: files in its `wandb` folder, for later sessions and `wandb sync`."""

    def __init__(self, folder: Path) -> None:
        """Opens a folder of pages; it may not exist yet.

        Args:
            folder: Where the pages are.
        """
        self._folder = folder
        self._bytes = sum(path.stat().st_size for path in folder.glob("*.html"))

    def add(self, episode_id: str, trajectory: EpisodeTrajectory) -> None:
        """Writes the page of an episode, unless the pages are too many already.

        Raises:
            OSError: It cannot be written.
        """
        from ares_exp.reports.written_report import episode_page

        if self._bytes < MAX_PAGES_BYTES:
            page = episode_page(trajectory).encode()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(episode_id).write_bytes(page)
            self._bytes += len(page)

    def find(self, episode_id: str) -> Path | None:
        """Returns the page of an episode; `None` if it has none."""
        path = self._path(episode_id)
        return path if path.is_file() and not path.is_symlink() else None

    def _path(self, episode_id: str) -> Path:
        return self._folder / f"{sha256(episode_id.encode(errors='surrogatepass')).hexdigest()[:32]}.html"


class EpisodesTable:
    """The table of one W&B run. It is logged as a whole each time that it has grown by half, and at the end."""

    def __init__(self, run: wandb.Run, pages: EpisodePages) -> None:
        """Makes an empty table.

        Args:
            run: Where it is logged.
            pages: The pages that its rows show.
        """
        self._run = run
        self._pages = pages
        self._results: list[EpisodeResult] = []
        self._logged = 0

    def add(self, *results: EpisodeResult) -> None:
        """Adds rows, and logs the table if it has grown enough."""
        self._results += results
        if len(self._results) > self._logged + self._logged // 2:
            self.flush()

    def flush(self) -> None:
        """Logs the table if it has rows that were not logged. Rewards by name are columns behind the others."""
        import wandb

        if len(self._results) > self._logged:
            named = reward_names(self._results)[:MAX_REWARDS]
            rows = [[*self._row(one), *(one.rewards.get(name) for name in named)] for one in self._results]
            columns: list[str | int] = [*COLUMNS, *(f"rewards/{name}" for name in named)]
            self._run.log({KEY: wandb.Table(columns=columns, data=rows)})
            self._logged = len(self._results)

    def _row(self, result: EpisodeResult) -> list[Any]:
        import wandb

        error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
        page = self._pages.find(result.episode_id)
        return [
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
            None if page is None else wandb.Html(str(page), inject=False),
        ]
