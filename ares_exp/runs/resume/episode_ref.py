"""References to episodes of earlier runs: `<run>/<episode>@<step>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import run_path
from ares_exp.runs.resume.recorded_run import RecordedEpisode, RecordedRun, is_recorded_run, no_such_run
from ares_exp.snapshots.snapshot_id import step_of


@dataclass(frozen=True, slots=True)
class EpisodeRef:
    """`<run>`, `<run>/<episode>` or `<run>/<episode>@<step>`, of which everything exists.

    Attributes:
        run: The run.
        episode: The episode; `None`: the whole run.
        step: Number of applied answers; `None`: not given.
    """

    run: RecordedRun
    episode: RecordedEpisode | None = None
    step: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Finds what `text` means: the longest part of it that is a run directory; the rest is the episode.

        Args:
            text: For the episode its id, a start of it that no other has, or its task if that was played once.

        Raises:
            ConfigError: There is no such run, episode or step; the message lists those that exist.
        """
        try:
            path = run_path(text).expanduser()
            run = next((place for place in (path, *path.parents) if is_recorded_run(place)), None)
        except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, no home, a NUL
            raise ConfigError(f"Expected <run>/<episode>@<step>, got {text!r:.200}: {error}") from error
        if run is None:
            raise ConfigError(no_such_run(path))
        if run == path:
            return cls(RecordedRun(run))
        name = path.relative_to(run).as_posix()
        step: int | None = None
        if (found := step_of(name)) is not None:
            name, step = found
        episode = RecordedRun(run).episode(name)
        if step is not None and step > episode.last_step:
            there = f"0 to {episode.last_step}" if episode.last_step > 0 else "0 alone"
            there = f"its steps are {there}" if episode.last_step >= 0 else "it never asked for an answer"
            raise ConfigError(f"Episode {episode.episode_id} of {run} has no step {step}: {there}.")
        return cls(RecordedRun(run), episode, step)

    def __str__(self) -> str:
        """Formats the reference in full, so that its meaning does not change later."""
        if self.episode is None:
            return str(self.run.path)
        return f"{self.run.path / self.episode.episode_id}{'' if self.step is None else f'@{self.step}'}"
