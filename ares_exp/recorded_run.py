"""What an earlier run recorded: which episodes it played, and how it was composed. All of it is untrusted input."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.config import close_matches
from ares_exp.errors import ConfigError, SnapshotError, TrajectoryFormatError
from ares_exp.plugins import PROVIDER
from ares_exp.record_files import broken, read_yaml
from ares_exp.results import Outcome
from ares_exp.run_dir import EPISODES, RunDir, open_regular
from ares_exp.snapshots.snapshot_id import step_of

SHOWN = 5
SWEEP_RECORD = "multirun.yaml"
PATH_KEY = re.compile(r"(^|[._])(paths?|dir|file|trajectory|replay|branch_from)$|^env\.(objects|registry)$")
"""Keys of a config whose value, if it is relative, begins at the folder where the run was started."""
_MAYBE_IN_A_REPOSITORY = ("env.path", "env.registry")

_AT_LAST_STEP = frozenset({Outcome.COMPLETED.value, Outcome.TRUNCATED.value})


def begins_where_started(key: str, given: Container[str]) -> bool:
    """Whether a relative value of `key` begins at the folder where the run was started.

    Args:
        key: Of a config, dotted.
        given: The keys that are set: with a git repository, the paths of its tasks begin there.
    """
    in_a_repository = key in _MAYBE_IN_A_REPOSITORY and ("env.repo" in given or "env.git_url" in given)
    return PATH_KEY.search(key) is not None and not in_a_repository


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """One episode of a run.

    Attributes:
        episode_id: As in `episodes.jsonl`, the trajectories and the snapshots.
        task_name: The task.
        last_step: The last step at which it waited for an answer, counting from 0; -1 where it never did.
    """

    episode_id: str
    task_name: str
    last_step: int


class RecordedRun:
    """A run directory, read. `<sweep>/<number>` is one, too.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        """Reads nothing yet.

        Raises:
            ConfigError: There is no run at `path`.
        """
        if not is_recorded_run(path):
            raise ConfigError(no_such_run(path))
        self.path = path

    def overrides(self) -> Sequence[str]:
        """The overrides it was started with, as they were typed, but for secrets; those of Hydra itself left out.

        Raises:
            ConfigError: They were not recorded, or cannot be read.
        """
        found = self._hydra_record("overrides.yaml")
        if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
            raise self._broken("overrides.yaml", "a list of overrides", _kind(found))
        return found

    def working_directory(self) -> Path:
        """Where it was started: what its relative paths begin at. Raises `ConfigError` as `overrides` does."""
        place = self._runtime().get("cwd")
        if not isinstance(place, str):
            raise self._broken("hydra.yaml", "the working directory", _kind(place))
        return Path(place)

    def config_dirs(self) -> Sequence[Path]:
        """The user's own folders of options (`--config-dir`), without those of plugins, which are found anew.

        Raises `ConfigError` as `overrides` does.
        """
        sources = self._runtime().get("config_sources")
        if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
            raise self._broken("hydra.yaml", "a list of config sources", _kind(sources))
        files = [one for one in sources if one.get("schema") == "file" and one.get("provider") != "main"]
        own = [one for one in files if not str(one.get("provider")).startswith(PROVIDER)]
        return [Path(str(source.get("path"))) for source in own]

    def episodes(self) -> Sequence[RecordedEpisode]:
        """What it played, finished or not: what its rows, trajectories and snapshots tell, taken together."""
        found: dict[str, RecordedEpisode] = {}
        for episode in (*self._rows(), *self.trajectories(partial=True)):  # a trajectory knows better than a row
            found[episode.episode_id] = episode
        for episode_id, step in self._snapshots():
            known = found.get(episode_id)
            task_name = known.task_name if known is not None else self._snapshotted_task(f"{episode_id}@{step}")
            if task_name is not None:
                last = max(step, -1 if known is None else known.last_step)
                found[episode_id] = RecordedEpisode(episode_id, task_name, last)
        return list(found.values())

    def episode(self, name: str) -> RecordedEpisode:
        """The episode of that id, of that task if it was played once, or whose id alone begins so.

        Raises:
            ConfigError: There is none, or there are several.
        """
        episodes = self.episodes()
        if not episodes:
            raise ConfigError(f"Expected recorded episodes in {self.path}, found none: nothing was played or kept.")
        for found in (
            [one for one in episodes if one.episode_id == name],
            [one for one in episodes if one.task_name == name],
            [one for one in episodes if one.episode_id.startswith(name)],
        ):
            if len(found) == 1:
                return found[0]
            if found:
                raise ConfigError(f"{name!r} means {len(found)} episodes of {self.path}: {_listed(found)}. Name one.")
        known = [*(one.episode_id for one in episodes), *dict.fromkeys(one.task_name for one in episodes)]
        close = close_matches(name, known) or f" It has {_listed(episodes)}."
        raise ConfigError(f"{self.path} has no episode {name!r}.{close}")

    def _rows(self) -> Iterator[RecordedEpisode]:
        """The rows; a torn one is that of an episode which never ended."""
        try:
            with open_regular(self.path / EPISODES) as lines:
                for line in lines:
                    if (episode := _of_row(line)) is not None:
                        yield episode
        except OSError as error:
            raise ConfigError(f"Cannot read {self.path / EPISODES}: {error.strerror}.") from error

    def trajectories(self, *, partial: bool = False) -> Iterator[RecordedEpisode]:
        """The episodes whose steps were recorded; those that have not ended only with `partial`."""
        from ares_exp.trajectories.stored_episodes import load

        try:
            stored = load(self.path, partial=partial, skip_broken=True)
        except TrajectoryFormatError as error:
            raise ConfigError(f"Cannot read the trajectories of a run: {error}") from error
        for episode in stored:
            ended = episode.outcome in _AT_LAST_STEP
            yield RecordedEpisode(episode.episode_id, episode.task_name, episode.num_steps - (2 if ended else 1))

    def _snapshots(self) -> Iterator[tuple[str, int]]:
        folder = RunDir(self.path).snapshots
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        yield from filter(None, map(step_of, names))

    def _snapshotted_task(self, snapshot_id: str) -> str | None:
        """Name of the task of an episode that left nothing but snapshots."""
        from ares_exp.snapshots.snapshot import EnvironmentSnapshot

        try:
            snapshot = EnvironmentSnapshot.load_from_file(RunDir(self.path).snapshots / snapshot_id)
        except SnapshotError:
            return None
        return str(snapshot.task_data["name"]) if "name" in snapshot.task_data else None

    def _runtime(self) -> dict[str, Any]:
        record = self._hydra_record("hydra.yaml")
        try:
            runtime = record["hydra"]["runtime"]
        except (KeyError, TypeError):
            runtime = None
        if not isinstance(runtime, dict):
            raise self._broken("hydra.yaml", "`hydra.runtime`", _kind(runtime))
        return runtime

    def _hydra_record(self, name: str) -> Any:
        path = self.path / ".hydra" / name
        try:
            return read_yaml(path)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}. Without Hydra's records of a run it cannot be composed again; its "
                f"trajectories alone can be played with `policy=replay policy.trajectory={self.path}`."
            ) from error

    def _broken(self, name: str, expected: str, got: str) -> ConfigError:
        return broken(self.path / ".hydra" / name, expected, got)


class RecordedSweep(RecordedRun):
    """The folder of a sweep: how all of its jobs were composed."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path

    def overrides(self) -> Sequence[str]:
        """The overrides it was started with, those of Hydra itself included. Raises `ConfigError` as for a run."""
        found = self._overrides()
        if not all(isinstance(line, str) for line in found):
            raise broken(self.path / SWEEP_RECORD, "lists of overrides", "something else")
        return found

    def _overrides(self) -> list[Any]:
        try:
            recorded = self._hydra_record("hydra.yaml")["hydra"]["overrides"]
            return [*recorded["hydra"], *recorded["task"]]
        except (KeyError, TypeError):
            raise broken(self.path / SWEEP_RECORD, "`hydra.overrides`", "none") from None

    def _hydra_record(self, name: str) -> Any:
        try:
            return read_yaml(self.path / SWEEP_RECORD)
        except OSError as error:
            raise ConfigError(f"{self.path / SWEEP_RECORD}: {error.strerror}.") from error


def is_recorded_run(path: Path) -> bool:
    """Whether a run wrote in `path`. Raises `OSError` for a path that cannot be one."""
    return (path / EPISODES).is_file()


def is_folder_of_runs(path: Path) -> bool:
    """Whether `path`, which is no run, has runs in it. Raises `OSError` if it cannot be read."""
    return not is_recorded_run(path) and any(map(is_recorded_run, path.iterdir()))


def no_such_run(path: Path) -> str:
    """What to say of a path at which there is no run: there is a sweep, something else, or nothing of that name."""
    place = next((one for one in (path, *path.parents) if one.exists()), Path())
    names = sorted(one.name for one in place.iterdir() if is_recorded_run(one)) if place.is_dir() else []
    if names:
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        missing = path.relative_to(place).parts[:1]
        close = close_matches(missing[0], names) if missing else ""
        return f"There is no run {path}: {place} is a folder of runs ({shown}).{close} Name one of them."
    if place == path:
        return f"{path} is no run directory: it has no {EPISODES}."
    return f"There is no run {path}: expected a run directory, or one followed by /<episode> or /<episode>@<step>."


def _kind(value: object) -> str:
    """What to call it: its text may be endless, as YAML can refer to the same list again and again."""
    return "nothing" if value is None else f"something else, a {type(value).__name__}"


def _of_row(line: bytes) -> RecordedEpisode | None:
    try:
        row = json.loads(line)
        episode_id, task_name, steps = row["episode_id"], row["task_name"], row["num_steps"]
        outcome = row["outcome"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (isinstance(episode_id, str) and isinstance(task_name, str) and isinstance(steps, int)):
        return None
    return RecordedEpisode(episode_id, task_name, steps - 1 if outcome in _AT_LAST_STEP or not steps else steps)


def _listed(episodes: Sequence[RecordedEpisode]) -> str:
    shown = ", ".join(episode.episode_id for episode in episodes[:SHOWN])
    return shown if len(episodes) <= SHOWN else f"{shown} and {len(episodes) - SHOWN} more"
