"""A session of a run, which is one execution by one process. The first session starts the run, later ones resume it.

Each session collects its provenance: the versions of its code and tasks, and the machine on which it runs.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ares_exp
from ares_exp.config.options import ENTRY_POINTS
from ares_exp.config.overrides import covers, dotted_items
from ares_exp.errors import ConfigError, TrajectoryFormatError, UserError
from ares_exp.records.environment_responses import recorded_usage
from ares_exp.records.recorded_results import read_object, read_results, read_sessions
from ares_exp.records.results import (
    RESPONSES_USED_UP,
    UNFINISHED,
    EnvironmentUsage,
    EpisodeResult,
    EpisodeUsage,
    ErrorInfo,
    Outcome,
    Replayed,
    RunSummary,
    final_results,
)
from ares_exp.records.run_dir import RunDir, append_durably, append_lines, dump_json, read_json_object, write_atomically
from ares_exp.records.secrets import scrub_argv
from ares_exp.records.terminal_text import count_of
from ares_exp.runs.resume.recorded_run import recorded_config, starts_where_started
from ares_exp.runs.scheduler import PlannedEpisode, Slot, episode_seed
from ares_exp.tasks.task_contract import TaskOrigin
from ares_exp.tasks.task_files import changed_files, content_of
from ares_exp.trajectories.recorded_responses import responses
from ares_exp.trajectories.response_log import SUFFIX, LoggedEpisode, logged_episodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreviousSessions:
    """The results and response logs that a run has from its earlier sessions.

    Attributes:
        results: Results of all episodes that ended or were lost.
        lost: Results in `results` that had no row, because the process died. This session has written their rows.
        logs: Response logs of attempts that have no final result, by attempt.
        wall_sec: Wall-clock seconds of earlier sessions.
        ended: Response logs that already contain a result, by attempt. Their process died before it wrote the row, and
            possibly before it stored the end of the trajectory.
    """

    results: tuple[EpisodeResult, ...] = ()
    lost: tuple[EpisodeResult, ...] = ()
    logs: Mapping[Slot, LoggedEpisode] = field(default_factory=dict)
    wall_sec: float = 0.0
    ended: Mapping[Slot, LoggedEpisode] = field(default_factory=dict)

    def owed(
        self, planned: Sequence[PlannedEpisode], *, run_seed: int, redo: Sequence[str] = ()
    ) -> list[PlannedEpisode]:
        """Returns the attempts to run: unfinished ones, attempts with an outcome in `redo`, and then new ones."""
        final = {(result.task_name, result.attempt): result for result in final_results(self.results)}
        started: list[PlannedEpisode] = []
        new: list[PlannedEpisode] = []
        for one in planned:
            last, log = final.get(one.slot), self.logs.get(one.slot)
            if last is None:
                new.append(one)
            elif log is not None and not log.has_started:
                started.append(replace(one, episode_id=log.episode_id, seed=log.seed, retry=log.retry))
            elif last.outcome in UNFINISHED or last.outcome.value in redo:
                retry = last.retry + 1
                if log is not None:
                    started.append(one.going_on(log, retry=retry))
                elif last.outcome in UNFINISHED:
                    started.append(one.anew(retry=retry, seed=last.seed))
                else:
                    started.append(one.anew(retry=retry, seed=episode_seed(run_seed, *one.slot, retry)))
        return [*started, *new]


def load_previous_sessions(run_dir: RunDir) -> PreviousSessions:
    """Reads the records of earlier sessions, and writes the missing rows of lost episodes. Blocking.

    Only the process that owns the run may call this function. If it is killed, the next process can call it again.

    Raises:
        UserError: The records of the run cannot be read.
        OSError: The files of the run cannot be written.
    """
    run_dir.sweep_up()
    recorded_results = read_results(run_dir.episodes)
    if recorded_results.torn:
        os.truncate(run_dir.episodes, recorded_results.whole_bytes)
    results = list(recorded_results.results)
    logs = logged_episodes(run_dir.responses)
    ended = {result.episode_id for result in results}
    _end_lost_trajectories(run_dir.path)
    lost = [log for log in logs if log.episode_id not in ended and log.has_started]
    in_progress = {log.slot for log in lost}
    never = [log for log in logs if not log.has_started and log.slot in in_progress]  # unstarted retries
    end_times = _end_times(run_dir.path, {log.episode_id for log in lost})
    new = [
        log.result or _lost(log, end_times.get(log.episode_id, 0.0), recorded_usage(run_dir.files / log.episode_id))
        for log in sorted(lost, key=lambda one: one.retry)
    ]
    for result in new:
        run_dir.append_episodes(dump_json(result.to_dict()))
    results += new
    ended_logs = {log.slot: log for log in lost if log.result is not None}
    latest = _latest(run_dir, logs, results, never)
    return PreviousSessions(tuple(results), tuple(new), latest, _wall_sec(run_dir, results), ended_logs)


def _latest(
    run_dir: RunDir, logs: Sequence[LoggedEpisode], results: Sequence[EpisodeResult], never: Sequence[LoggedEpisode]
) -> dict[Slot, LoggedEpisode]:
    """Returns the newest response log of every attempt that needs another episode, and deletes all other logs.

    If the attempt's last episode ended before it had its own log, the newest log is from an earlier episode.
    """
    used_up = {(one.task_name, one.attempt) for one in final_results(results) if one.outcome in RESPONSES_USED_UP}
    useful = [log for log in logs if log.slot not in used_up and log not in never]
    newest = {log.slot: log for log in sorted(useful, key=lambda one: one.retry)}
    for log in logs:
        if newest.get(log.slot) is not log:
            (run_dir.responses / f"{log.episode_id}{SUFFIX}").unlink(missing_ok=True)
    return newest


def _lost(log: LoggedEpisode, end_time: float, used: EnvironmentUsage | None) -> EpisodeResult:
    """Creates the result of an episode whose process died, from its response log."""
    usage = EpisodeUsage()
    for response in responses(log.exchanges):
        usage.add(response)
    for response in responses(log.ahead):
        usage.pay(response)
    taken_over = [*responses(log.exchanges[: log.taken_over]), *log.ahead_taken_over]
    return EpisodeResult(
        episode_id=log.episode_id,
        task_name=log.task_name,
        attempt=log.attempt,
        seed=log.seed,
        outcome=Outcome.LOST,
        reward=None,
        error=ErrorInfo("lost", f"its process died after {usage.num_steps} responses"),
        num_steps=usage.num_steps,
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.generated_tokens,
        cost=usage.cost,
        started_at=log.started_at,
        finished_at=max(log.started_at, end_time),
        retry=log.retry,
        replayed=Replayed.of(log.parent, taken_over) if log.parent is not None else None,
        environment_usage=used,
        length_stops=usage.length_stops,
    )


def _end_lost_trajectories(path: Path) -> None:
    from ares_exp.trajectories.files.episode_file import end_lost_episodes
    from ares_exp.trajectories.stored_episodes import find_files

    try:
        for file in [file for group in find_files(path) for file in group]:
            try:
                end_lost_episodes(file)
            except TrajectoryFormatError as error:
                logger.warning("%s", error)
    except TrajectoryFormatError as error:
        logger.info("The trajectories of interrupted episodes cannot be completed: %s", error)


def _end_times(path: Path, wanted: set[str]) -> dict[str, float]:
    from ares_exp.trajectories.stored_episodes import load

    if not wanted:
        return {}
    try:
        return {one.episode_id: one.end_time for one in load(path, skip_broken=True) if one.episode_id in wanted}
    except (TrajectoryFormatError, UserError) as error:
        logger.info("The end times of interrupted episodes cannot be read: %s", error)
        return {}


_BESIDE = ("numpy", "openai")
"""Optional packages whose versions are recorded, because they can affect results."""
_GIT_TIMEOUT_SEC = 5.0


def collect_provenance(
    *, task_set_path: Path | None = None, task_origins: Mapping[str, TaskOrigin] | None = None
) -> dict[str, Any]:
    """Collects the versions of code and tasks and the facts about this machine that may explain a run's results.

    Returns:
        A JSON-ready mapping. `project` and `task_set` are the git states of the checkout of `ares_exp` and of the
        folder of tasks. Each is `{"commit", "dirty"}`, or `None` if git is missing or does not track the folder.
        `task_origins` is `{"git_url", "git_commit", "path"}` for each task that was fetched from git, by name.
        `packages` contains the versions of requirements and plugins, by name; `None` if a package is not installed. The
        other keys are `ares_exp_version`, `python`, `platform`, `hostname`, `pid`, `argv` (with masked secrets) and
        `python_hash_seed`.
    """
    checkout = Path(ares_exp.__file__).resolve().parent.parent
    return {
        "ares_exp_version": ares_exp.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _distributions()},
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "argv": scrub_argv(sys.argv),
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "project": _git_state(checkout) if (checkout / ".git").exists() else None,
        "task_set": _git_state(task_set_path) if task_set_path is not None else None,
        "task_origins": {name: asdict(origin) for name, origin in (task_origins or {}).items()},
    }


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the git commit of a folder, and whether files in it have changed (`{"commit": hash, "dirty": bool}`).

    Returns `None` if git is missing or does not track the folder.
    """
    folder = folder if folder.is_dir() else folder.parent
    # The output is empty if an enclosing repository does not track the folder, such as a virtual environment.
    if not _git(folder, "ls-tree", "--name-only", "HEAD", "."):
        return None
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--", ".")
    if status is None:
        return None
    headers = [line for line in status.splitlines() if line.startswith("# ")]
    commit = next((line.split()[-1] for line in headers if line.startswith("# branch.oid")), None)
    return {"commit": commit, "dirty": len(status.splitlines()) > len(headers)}


def _git(folder: Path, *arguments: str) -> str | None:
    # GIT_DIR, which hooks set, selects another repository. A repository can name a program (`core.fsmonitor`) to run.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_SEC,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _distributions() -> list[str]:
    from packaging.requirements import Requirement

    try:
        requirements = importlib.metadata.requires("ares-exp") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    ours = [Requirement(text).name for text in requirements if "extra ==" not in text]
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    plugins = [point.dist.name for point in points if point.dist is not None]
    return list(dict.fromkeys([*ours, *_BESIDE, *plugins]))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


SHOWN = 5
RESUME_KEYS = ("resume", "resume_redo", "resume_force")
VERBS = ("resume", "replay", "branch_from")
BRANCH_KEYS = ("branches", "branch", "branch.inject", "branch.edit", "branch.response")

_GROUPS = ("collector", "tracker", "snapshot", "wrapper", "retry", "budget", "executor")
_TOP_LEVEL = (
    *("name", "attempts", "branches", "concurrency", "timeouts.policy", "objective"),
    *("reward_threshold", *RESUME_KEYS),
)
_OF_THE_ENDPOINT = (
    *("api_key_env", "timeout_sec", "max_retries", "retry_base_sec", "max_retry_wait_sec", "max_concurrency"),
    *("max_response_bytes", "preflight_timeout_sec", "stream", "stream_idle_sec"),
)
_OF_THE_MODEL = ("output_dir", "activations_max_bytes")
_OF_FETCHING = ("env.cache_dir", "env.git_timeout_sec")
KEYS_THAT_MAY_CHANGE = (
    *(*_GROUPS, *_TOP_LEVEL, *_OF_FETCHING),
    *(f"policy.{name}" for name in (*_OF_THE_ENDPOINT, *_OF_THE_MODEL)),
)
"""Config keys that may have new values when a run is resumed, because they do not change results."""

_PACKAGE_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Session:
    """One execution of a run by a process. `earlier` is `None` if this is the first session of the run."""

    run_id: str
    earlier: PreviousSessions | None = None


def open_session(
    run_dir: RunDir,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    tasks: Mapping[str, str | None],
    warnings: Sequence[str],
) -> Session:
    """Starts a new run, or resumes the run that is already in `run_dir`. Blocking.

    This process must own the directory.

    Args:
        run_dir: Directory of the run.
        config: Resolved config without secrets.
        provenance: Provenance of this process.
        tasks: Selected tasks, each with a digest of its content.
        warnings: Warnings that were shown to the user so far.

    Raises:
        ConfigError: The directory contains another experiment, or its records cannot be read.
        OSError: The directory is not writable.
    """
    from omegaconf import OmegaConf

    earlier: PreviousSessions | None = None
    run_id = os.urandom(4).hex()
    if run_dir.has_run:
        try:
            recorded = read_json_object(run_dir.provenance)
        except OSError as error:
            raise ConfigError(f"{run_dir.provenance} cannot be read: {error}.") from error
        _check_same(run_dir, config, recorded, tasks, provenance)
        run_id = str(recorded.get("run_id", run_id))
        earlier = load_previous_sessions(run_dir)
    else:
        found = {"run_id": run_id, "seed": config["seed"], **provenance, "warnings": list(warnings), "tasks": tasks}
        run_dir.write_json(run_dir.provenance, {**found, "cwd": str(Path.cwd())})
        text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
        write_atomically(run_dir.config, text)  # written last, because it marks the run as started
    line = {
        "started": time.time(),
        "pid": os.getpid(),
        "hostname": provenance["hostname"],
        "ares_exp_version": provenance["ares_exp_version"],
        "argv": scrub_argv(sys.argv),
        "resumed": earlier is not None,
        "attempts": config["attempts"],
    }
    append_lines(run_dir.sessions, line)
    return Session(run_id, earlier)


def close_session(run_dir: RunDir, summary: RunSummary) -> None:
    """Records the end of the session in `sessions.jsonl`, and removes the folder of response logs if it is empty."""
    line = dump_json({"ended": time.time(), "interrupted": summary.interrupted})
    try:
        append_durably(run_dir.sessions, f"{line}\n")  # does not create a deleted directory again
        if run_dir.responses.is_dir() and not any(run_dir.responses.iterdir()):
            run_dir.responses.rmdir()
    except OSError as error:
        level = logging.WARNING if summary.ended_by is None else logging.DEBUG  # the reason was already reported
        logger.log(level, "Writing %s failed: %s", run_dir.sessions.name, error.strerror)


def _check_same(
    run_dir: RunDir,
    config: Mapping[str, Any],
    recorded: Mapping[str, Any],
    tasks: Mapping[str, str | None],
    provenance: Mapping[str, Any],
) -> None:
    """Raises `ConfigError`, or logs a warning with `resume_force=true`, if the config, tasks or agent have changed."""
    was = recorded_config(run_dir.path)
    place = Path(str(recorded.get("cwd", ".")))
    differing = [
        *(
            f"`{key}` was {before!r:.100} and is {after!r:.100}"
            for key, before, after in config_differences(was, config, place=place)
        ),
        *_task_differences(recorded.get("tasks"), tasks),
    ]
    agent, now = recorded.get("agent_version"), provenance.get("agent_version")
    if None not in (agent, now) and agent != now:
        differing.append(f"the agent was {agent!r:.200} and is {now!r:.200}")
    if not differing:
        return
    shown = "; ".join(differing[:SHOWN]) + (f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else "")
    if config["resume_force"]:
        logger.warning("The run is resumed although its config or tasks have changed: %s.", shown)
        return
    raise ConfigError(
        f"Expected the experiment that {run_dir.path} was started with, but it has changed: {shown}. The results "
        "would be mixed. Undo the changes, start another run, or use `resume_force=true` to mix the results."
    )


def check_package(recorded_run: Path, provenance: Mapping[str, Any], *, forced: bool) -> None:
    """Raises `ConfigError` if the recorded run used another agent package, or logs a warning if `forced` is set."""
    was = str(read_object(RunDir(recorded_run).provenance).get("agent_version"))
    now = str(provenance.get("agent_version"))
    before, after = _PACKAGE_DIGEST.search(was), _PACKAGE_DIGEST.search(now)
    if before is not None and after is not None and before[0] != after[0]:
        problem = f"Expected the agent package that {recorded_run} used ({was:.200}), got {now:.200}."
        if not forced:
            raise ConfigError(
                f"{problem} The agent may send other requests. Pack the recorded version again (`ares-exp agents "
                "pack`), start another run, or use `resume_force=true` to use the package anyway."
            )
        logger.warning("%s", problem)


def config_differences(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    place: Path | None = None,
    may_differ: Collection[str] = KEYS_THAT_MAY_CHANGE,
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys in which two resolved configs differ, each with its value in `was` and its value in `now`.

    Keys are dotted. The string `"nothing"` stands for a missing value. Relative paths in `was` are resolved against
    `place`, or the current directory. Keys in `may_differ`, and keys below them, are skipped.
    """
    old, new = dict(dotted_items(was)), dict(dotted_items(now))
    given = {key for key, value in new.items() if value is not None}
    for key in [*new, *(key for key in old if key not in new)]:
        if any(covers(one, key) for one in may_differ):
            continue
        before, after = old.get(key, "nothing"), new.get(key, "nothing")
        if starts_where_started(key, given):
            same = _places(before, place or Path.cwd()) == _places(after, Path.cwd())
        elif key.endswith("base_url"):
            same = _without_port(before) == _without_port(after)
        else:
            same = before == after
        if not same:
            yield key, before, after


def _without_port(url: Any) -> Any:
    """Splits a URL into parts without the port, because the port of a local server can change at each start."""
    try:
        parts = urlsplit(str(url))
        return parts.scheme, parts.username, parts.hostname, parts.path.rstrip("/"), parts.query
    except ValueError:
        return url


def _places(value: Any, start: Path) -> Any:
    if isinstance(value, list):
        return [_places(one, start) for one in value]
    return (start / value).resolve() if isinstance(value, str) else value


def _task_differences(recorded: Any, tasks: Mapping[str, str | None]) -> Iterator[str]:
    before = recorded if isinstance(recorded, dict) else {}
    if gone := [name for name in before if name not in tasks]:
        yield f"{count_of(len(gone), 'task is', 'tasks are')} no longer selected ({', '.join(gone[:SHOWN])})"
    if new := [name for name in tasks if name not in before]:
        yield f"{count_of(len(new), 'task is', 'tasks are')} new ({', '.join(new[:SHOWN])})"
    if changed := [n for n, now in tasks.items() if content_of(before.get(n)) not in (None, content_of(now))]:
        yield f"the files of {count_of(len(changed), 'task')} have changed ({', '.join(changed[:SHOWN])})"
    if others := dict.fromkeys(file for name, now in tasks.items() for file in changed_files(before.get(name), now)):
        yield f"other files that agents read have changed ({', '.join(list(others)[:SHOWN])})"


def _wall_sec(run_dir: RunDir, results: Sequence[EpisodeResult]) -> float:
    """Returns the total seconds of earlier sessions. A killed session counts until the end of its last episode."""
    starts: list[float] = []
    ends: list[float] = []
    for line in read_sessions(run_dir):
        with suppress(ValueError, TypeError, OverflowError):
            starts += [float(line["started"])] if "started" in line else []
            ends += [float(line["ended"])] if "ended" in line else []
    ends += [result.finished_at for result in results]
    total = 0.0
    for started, following in pairwise([*starts, math.inf]):
        total += max((end - started for end in ends if started <= end < following), default=0.0)
    return total
