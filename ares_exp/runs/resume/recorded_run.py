"""Readers for the records of an earlier run: its episodes, config and overrides. All records are untrusted input.

The files of another user's run must not do harm on this machine. A run directory is trusted if it belongs to this user
and no other user can write in it. Other run directories can only be used with `resume_force=true`, and are treated as
hostile. Their numbers, strings and names of options are used. A class in their config is used only if an option on this
machine names the same class. Untrusted sweeps are never resumed. No record can define options, or read environment
variables of this machine. All code that composes a command from a record uses the checks of this module.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import stat
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError

from ares_exp.config.options import PROVIDER, SCHEME
from ares_exp.config.overrides import covers, dotted_items, leaves
from ares_exp.config.targets import classes_of_options
from ares_exp.errors import ConfigError, SnapshotError, TrajectoryFormatError, close_matches
from ares_exp.records.latest_run import run_path
from ares_exp.records.results import Outcome, attempt_of
from ares_exp.records.run_dir import EPISODES, SWEEP_RECORD, RunDir, broken, is_file, open_regular, read_yaml
from ares_exp.records.secrets import MASK
from ares_exp.records.terminal_text import first_of
from ares_exp.snapshots.snapshot import EnvironmentSnapshot, step_of

SHOWN = 5
PATH_KEY = re.compile(
    r"(^|[._])(paths?|dir|file|trajectory|replay|branch_from)$|^env\.(objects|registry)$|^agent\.(mount$|files\.)"
)
"""Pattern of config keys with paths. A relative path is resolved against the folder in which the run was started."""
_MAYBE_IN_A_REPOSITORY = ("env.path", "env.registry")

_AT_LAST_STEP = frozenset({Outcome.COMPLETED.value, Outcome.TRUNCATED.value})


def starts_where_started(key: str, given: Container[str]) -> bool:
    """Returns whether the value of `key` is a path that is relative to the folder in which the run was started.

    If a key in `given` selects a git repository, returns false for paths of tasks, which are relative to it.
    """
    in_a_repository = key in _MAYBE_IN_A_REPOSITORY and ("env.repo" in given or "env.git_url" in given)
    return PATH_KEY.search(key) is not None and not in_a_repository


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """One episode of a recorded run.

    Attributes:
        episode_id: Id of the episode, as in `episodes.jsonl`, the trajectories and the snapshots.
        last_step: Number of the last step at which the episode waited for a response. Steps count from 0; -1 if the
            episode never waited.
    """

    episode_id: str
    task_name: str
    last_step: int


class _Source(BaseModel):
    path: str
    schema_: str = Field(alias="schema")
    provider: str


class _Runtime(BaseModel):
    cwd: str
    config_sources: list[_Source]
    choices: dict[str, Any] = {}


class _Hydra(BaseModel):
    runtime: _Runtime
    overrides: dict[str, list[str]] = {}


class _HydraRecord(BaseModel):
    hydra: _Hydra


class RecordedRun:
    """The records in the run directory `path`, such as `outputs/first`, or `<sweep>/<number>` for a job of a sweep."""

    def __init__(self, path: Path) -> None:
        """Checks that `path` is a run directory, and otherwise raises `ConfigError`. Does not read the records yet."""
        if not is_recorded_run(path):
            raise ConfigError(no_such_run(path))
        self.path = path

    def overrides(self) -> Sequence[str]:
        """Returns the overrides with which the run was started, with masked secrets and without Hydra's own keys.

        Raises:
            ConfigError: The overrides were not recorded, or cannot be read.
        """
        found = self._hydra_record("overrides.yaml")
        if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
            raise broken(self._hydra_file("overrides.yaml"), "a list of overrides", _kind(found))
        return found

    def composed_config(self) -> dict[str, Any]:
        """Returns the config, with unresolved references such as `${seed}`. Raises the same errors as `overrides`."""
        found = self._hydra_record("config.yaml")
        if not isinstance(found, dict):
            raise broken(self._hydra_file("config.yaml"), "a config", _kind(found))
        return found

    def working_directory(self) -> Path:
        """Returns the folder in which the run was started. Raises the same errors as `overrides`."""
        return Path(self._record().runtime.cwd)

    def config_dirs(self) -> Sequence[Path]:
        """Returns the folders that the user passed with `--config-dir`. Raises the same errors as `overrides`."""
        sources = self._record().runtime.config_sources
        folders = [one for one in sources if one.schema_ in ("file", SCHEME) and one.provider != "main"]
        own = [Path(one.path) for one in folders if not one.provider.startswith(PROVIDER)]
        return list(dict.fromkeys(own))  # Hydra lists a `--config-dir` twice

    def choices(self) -> dict[str, str]:
        """Returns the name of the chosen option for each config group. Raises the same errors as `overrides`."""
        return {group: option for group, option in self._record().runtime.choices.items() if isinstance(option, str)}

    def episodes(self) -> Sequence[RecordedEpisode]:
        """Lists all episodes of the run, also unfinished ones. Finds them in the rows, trajectories and snapshots."""
        found: dict[str, RecordedEpisode] = {}
        for episode in (*self._rows(), *self.trajectories(partial=True)):  # trajectories take precedence over rows
            found[episode.episode_id] = episode
        for episode_id, step in self._snapshots():
            known = found.get(episode_id)
            task_name = known.task_name if known is not None else self._snapshotted_task(f"{episode_id}@{step}")
            if task_name is not None:
                last = max(step, -1 if known is None else known.last_step)
                found[episode_id] = RecordedEpisode(episode_id, task_name, last)
        return list(found.values())

    def episode(self, name: str) -> RecordedEpisode:
        """Finds the episode that `name` refers to: an episode id, the start of an id, or a task name.

        If several episodes of the same attempt match, returns the last of these episodes.

        Raises:
            ConfigError: No episode matches, or episodes of several attempts match.
        """
        episodes = self.episodes()
        if not episodes:
            raise ConfigError(
                f"There are no recorded episodes in {self.path}: no episode ran, or the records were deleted."
            )
        for found in (
            [one for one in episodes if one.episode_id == name],
            [one for one in episodes if one.task_name == name],
            [one for one in episodes if one.episode_id.startswith(name)],
        ):
            if len({attempt_of(one.episode_id) for one in found}) == 1:
                return found[-1]
            if found:
                raise ConfigError(f"{name!r} matches {len(found)} episodes of {self.path}: {_listed(found)}. Name one.")
        known = dict.fromkeys([*(one.episode_id for one in episodes), *(one.task_name for one in episodes)])
        close = close_matches(name, known) or f" It has {_listed(episodes)}."
        raise ConfigError(f"{self.path} has no episode {name!r}.{close}")

    def _rows(self) -> Iterator[RecordedEpisode]:
        """Yields the episodes in `episodes.jsonl`. Skips invalid rows, such as an incomplete last row."""
        try:
            with open_regular(self.path / EPISODES) as lines:
                for line in lines:
                    if (episode := _of_row(line)) is not None:
                        yield episode
        except OSError as error:
            raise ConfigError(f"Cannot read {self.path / EPISODES}: {error.strerror}.") from error

    def trajectories(self, *, partial: bool = False) -> Iterator[RecordedEpisode]:
        """Yields the episodes that have a trajectory. If `partial` is set, also yields running and lost episodes."""
        from ares_exp.trajectories.stored_episodes import load

        try:
            stored = load(self.path, partial=partial, skip_broken=True)
        except TrajectoryFormatError as error:
            raise ConfigError(f"Cannot read the trajectories of a run: {error}") from error
        for episode in stored:
            if episode.outcome is Outcome.LOST and not partial:
                continue
            ended = episode.outcome in _AT_LAST_STEP
            yield RecordedEpisode(episode.episode_id, episode.task_name, episode.num_steps - (2 if ended else 1))

    def _snapshots(self) -> Iterator[tuple[str, int]]:
        folder = RunDir(self.path).snapshots
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        yield from filter(None, map(step_of, names))

    def _snapshotted_task(self, snapshot_id: str) -> str | None:
        try:
            snapshot = EnvironmentSnapshot.load_from_file(RunDir(self.path).snapshots / snapshot_id)
        except SnapshotError:
            return None
        return str(snapshot.task_data["name"]) if "name" in snapshot.task_data else None

    def _record(self) -> _Hydra:
        try:
            return _HydraRecord.model_validate(self._hydra_record("hydra.yaml")).hydra
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, problem["loc"])) or "the file"
            expected = f"a valid value of {place:.80}"
            raise broken(self._hydra_file("hydra.yaml"), expected, problem["msg"]) from error

    def _hydra_file(self, name: str) -> Path:
        return self.path / ".hydra" / name

    def _hydra_record(self, name: str) -> Any:
        path = self._hydra_file(name)
        try:
            return read_yaml(path)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}. Hydra writes this file. Without it, the config of the run is unknown. To "
                f"replay only its trajectories, use `policy=replay policy.trajectory={self.path}`."
            ) from error


class RecordedSweep(RecordedRun):
    """The records in the folder of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def overrides(self) -> Sequence[str]:
        """Returns the overrides of the sweep, including Hydra's own keys. Raises the same errors as for a run."""
        typed = self._record().overrides
        return [*typed.get("hydra", ()), *typed.get("task", ())]

    def _hydra_file(self, name: str) -> Path:
        return self.path / SWEEP_RECORD


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """Reads the config of a run, in which references such as `${seed}` were resolved when the run was started.

    Raises:
        OSError: The config cannot be read, or is not a regular file.
        ConfigError: The file is not a valid config.
    """
    path = RunDir(run_dir).config
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise broken(path, "a config", _kind(found))
    return {str(key): value for key, value in found.items()}


def is_recorded_run(path: Path) -> bool:
    """Returns whether `path` is a run directory. Raises `OSError` if the path cannot be accessed."""
    return is_file(path / EPISODES)


def is_folder_of_runs(path: Path) -> bool:
    """Returns whether `path` is a folder that contains runs but is not a run. Raises `OSError` if it cannot be read."""
    return not is_recorded_run(path) and any(map(is_recorded_run, path.iterdir()))


def no_such_run(path: Path) -> str:
    """Returns the reason why `path` is not a run: for example, it is missing or a folder of runs."""
    place = next((one for one in (path, *path.parents) if one.exists()), Path())
    names = sorted(one.name for one in place.iterdir() if is_recorded_run(one)) if place.is_dir() else []
    if names:
        missing = path.relative_to(place).parts[:1]
        close = close_matches(missing[0], names) if missing else ""
        return (
            f"There is no run {path}: {place} is a folder of runs ({first_of(names, SHOWN)}).{close} Name one of them."
        )
    if place == path:
        return f"{path} is not a run directory: it has no {EPISODES}."
    return f"There is no run {path}: expected a run directory, optionally followed by /<episode> or /<episode>@<step>."


def _kind(value: object) -> str:
    """Returns the type of an invalid value for an error message, because the value itself can be extremely long."""
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
    return first_of([episode.episode_id for episode in episodes], SHOWN)


@dataclass(frozen=True, slots=True)
class EpisodeRef:
    """A reference to an existing run, episode or step: `<run>`, `<run>/<episode>` or `<run>/<episode>@<step>`.

    Attributes:
        run: The run.
        episode: The episode; `None` if the reference is to the whole run.
        step: Number of the step, which is the number of responses before it; `None` if the reference has no step.
    """

    run: RecordedRun
    episode: RecordedEpisode | None = None
    step: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a reference and finds what it refers to.

        The run is the longest prefix of `text` that is a run directory. The text after it names the episode by its id,
        the start of its id, or its task if the task has a single attempt.

        Raises:
            ConfigError: The run, episode or step does not exist. The message lists existing ones.
        """
        try:
            path = run_path(text).expanduser()
            run = next((place for place in (path, *path.parents) if is_recorded_run(place)), None)
        except (OSError, RuntimeError, ValueError) as error:  # for example, a long name or a NUL
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
            steps = f"its steps are 0 to {episode.last_step}" if episode.last_step > 0 else "its only step is 0"
            there = steps if episode.last_step >= 0 else "it never requested a response"
            raise ConfigError(f"Episode {episode.episode_id} of {run} has no step {step}: {there}.")
        return cls(RecordedRun(run), episode, step)

    def __str__(self) -> str:
        """Formats the reference with the full episode id. A task name could refer to another episode later."""
        if self.episode is None:
            return str(self.run.path)
        return f"{self.run.path / self.episode.episode_id}{'' if self.step is None else f'@{self.step}'}"


SCORERS = "env.scorers"
_NOT_OF_THE_RUN = ("defaults", "hydra")
"""Keys of a recorded config that configure Hydra instead of the run."""
_IN_TEXT = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{([\w.]+|hydra:(runtime\.output_dir|run\.dir))\}")
"""Pattern of references that are safe in a record: to config keys or to the run directory.

Other references, such as to environment variables, could read or change this machine.
"""


def is_trusted(run_dir: Path) -> bool:
    """Returns whether a run directory and its config files belong to this user, and no other user can write to them."""
    hydra = run_dir / ".hydra"
    records = [RunDir(run_dir).config, run_dir / SWEEP_RECORD, hydra, *(hydra.iterdir() if hydra.is_dir() else ())]
    found = [run_dir.stat(), *(path.lstat() for path in records if os.path.lexists(path))]
    return all(one.st_uid == os.getuid() and not _is_writable_by_others(one) for one in found)


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Returns whether other users can write to a file. A group that contains only this user does not count."""
    try:
        name, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(status.st_gid)
        is_own_group = group.gr_name == name and {*group.gr_mem} <= {name}
    except KeyError:
        is_own_group = False
    return bool(status.st_mode & (stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP))


def check_trust(run_dir: Path, *, forced: bool) -> None:
    """Raises `ConfigError` if a run directory is not trusted, unless `forced` is set (`resume_force=true`)."""
    if not forced and not is_trusted(run_dir):
        raise ConfigError(
            f"Expected a run directory that only you can write to, got {run_dir}: it belongs to another user, or other "
            "users can write to it. Use `resume_force=true` to use it anyway."
        )


def values_of(run: RecordedRun) -> dict[str, Any]:
    """Returns the recorded config of a run, as a base to which overrides can be applied.

    References to other config keys and to the run directory are kept, so that they use the new values. For example,
    `branches=4` also changes `attempts`, and a new run writes to its own directory. All other values are from the start
    of the run.

    Raises:
        ConfigError: The records are missing or broken.
    """
    values, composed = values_as_meant(run), run.composed_config()
    if missing := [key for key in composed if key not in values]:  # both are written when the run starts
        got = "a file without this key, because it was truncated or changed. Restore the file, or start another run"
        raise broken(RunDir(run.path).config, f"the key `{missing[0]}`", got)
    return {key: _text(value, composed.get(key)) for key, value in values.items() if key not in _NOT_OF_THE_RUN}


def values_as_meant(run: RecordedRun) -> dict[str, Any]:
    """Returns the recorded config of a run, with paths resolved against the folder in which the run was started.

    Raises:
        ConfigError: The records are missing or broken.
    """
    try:
        values = recorded_config(run.path)
    except OSError as error:
        raise ConfigError(f"{run.path / 'config.yaml'}: {error.strerror}. The config of the run is unknown.") from error
    place = run.working_directory()
    given = {key for key, value in dotted_items(values) if value is not None}

    def meant(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: meant(f"{key}.{name}", one) for name, one in value.items()}
        if isinstance(value, list):
            return [meant(key, one) for one in value]
        return str(place / value) if isinstance(value, str) and value and starts_where_started(key, given) else value

    return values if place == Path.cwd() else {key: meant(key, value) for key, value in values.items()}


def _text(value: Any, composed: Any) -> Any:
    """Returns the reference `composed` if it is safe to resolve again; if not, the recorded value with escaped `${`."""
    if isinstance(composed, str) and "${" in composed and "${" not in _REFERENCE.sub("", composed):
        return composed
    if isinstance(value, dict):
        below = composed if isinstance(composed, dict) else {}
        return {name: _text(one, below.get(name)) for name, one in value.items()}
    if isinstance(value, list):
        items: list[Any] = composed[: len(value)] if isinstance(composed, list) else []
        return [_text(one, other) for one, other in zip_longest(value, items)]
    return _IN_TEXT.sub(lambda found: f"{2 * found[1]}\\${{", value) if isinstance(value, str) else value


def check_values(
    run: RecordedRun, values: Mapping[str, Any], *, typed: Collection[str], config_dirs: Sequence[Path]
) -> None:
    """Checks that recorded values can be used. Keys in `typed` are not checked, because the user sets them now.

    Raises:
        ConfigError: A value is a masked secret, or the run is not trusted and names a class that no option on this
            machine names. The message names the keys to set.
    """
    recorded = [(key, one) for key, one in leaves(values) if not any(covers(new, key) for new in typed)]
    check_secrets([key for key, one in recorded if isinstance(one, str) and MASK in one])
    if is_trusted(run.path):
        return
    known = classes_of_options(config_dirs)
    is_typed = any(covers(new, SCORERS) for new in typed)
    functions = [] if is_typed else [(SCORERS, name) for name in _functions_of_scorers(values.get("env"))]
    for key, one in [*(leaf for leaf in recorded if "_target_" in leaf[0].split(".")), *functions]:
        if one not in known:
            raise ConfigError(
                "The recorded config names a class that is not part of an available option, so it is not "
                f"loaded: `{key}={one!s:.100}`. Choose an option, or repeat the override if you trust the "
                "class."
            )


def _functions_of_scorers(env: Any) -> list[str]:
    """Returns the scorers in a recorded `env` that are given only by the name of a function."""
    scorers = env.get("scorers") if isinstance(env, Mapping) else None
    named = scorers.values() if isinstance(scorers, Mapping) else scorers if isinstance(scorers, list) else ()
    return [one for one in named if isinstance(one, str)]


def check_config_dirs(run: RecordedRun) -> Sequence[Path]:
    """Returns the recorded folders of options, after checking that they exist outside of the run directory.

    A run must not bring its own options, because options name classes that are loaded.

    Raises:
        ConfigError: A folder is missing, or is in the run directory.
    """
    folders = run.config_dirs()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{run.path} was composed with the options in {folder}, which is missing now. Restore the folder."
            )
        if not folder.is_absolute() or folder.resolve().is_relative_to(run.path.resolve()):
            raise ConfigError(
                f"Expected the option folder of {run.path} to be outside of this run directory, got {folder}."
            )
    return folders


def check_secrets(keys: Sequence[str]) -> None:
    """Raises `ConfigError` if there are any `keys` whose recorded values are masked secrets."""
    if keys:
        again = " ".join(f"{key}=…" for key in keys)
        raise ConfigError(
            f"The recorded run had secrets for {', '.join(keys)}, which are not stored on disk. "
            f"Set them again ({again}), or remove one with `~{keys[0]}`."
        )
