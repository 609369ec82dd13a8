"""The payload of a run, which is the JSON data that its page shows. The run may still be running.

The statistics are the same as in `results.json`. They are read from this file if it covers all episodes, and otherwise
computed by the same code. All views of a run (the report, the live page, W&B) use this payload.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ares_exp.config.overrides import dotted_items
from ares_exp.errors import ConfigError
from ares_exp.records.recorded_results import (
    added_rewards,
    object_or_empty,
    read_sessions,
    recorded_summary,
    with_added,
)
from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.run_dir import RunDir, is_run, read_tail
from ares_exp.records.statistics.estimate import mean_over_attempts
from ares_exp.records.statistics.run_statistics import by_task, json_ready, mean_scores, results_document
from ares_exp.records.terminal_text import count_of
from ares_exp.reports.episode_payload import episode_files, episode_payload, file_changes
from ares_exp.reports.summary import format_estimate, run_facts
from ares_exp.trajectories.files.line_file import has_writer
from ares_exp.trajectories.stored_episodes import HeaderCache, StoredEpisode, StoredEpisodes, load

SCHEMA_VERSION = 1
PROGRAM = "ares-exp"
QUIET_SEC = 120.0
"""Seconds without a write after which a run on another machine, whose lock is not visible, counts as killed."""
MAX_CONFIG_KEYS = 2_000
LOG_BYTES = 48 * 2**10
OF_THE_ROW = (
    *("episode_id", "task_name", "attempt", "retry", "seed", "outcome", "reward", "rewards", "note", "error"),
    *("num_steps", "prompt_tokens", "generated_tokens", "cost", "length_stops", "format_errors", "phase_sec"),
    *("container_image", "snapshots", "snapshot_failures", "stages", "replayed"),
)
"""Fields of `episodes.jsonl` that the payload contains."""
OF_THE_METADATA = ("model", "policy", "agent", "lineage")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state and the times of a run.

    Attributes:
        name: `finished`, `incomplete` (it ended early), `interrupted`, `killed` or `running`.
        started: Start of the first session, in epoch seconds; `None` if not recorded.
        ended: End of the last session, in epoch seconds; `None` if the last session is still running or was killed.
        sessions: Number of sessions of the run so far.
    """

    name: str
    started: float | None
    ended: float | None
    sessions: int


class ShownRun:
    """A run that a report or page shows. The files in its directory are read when they are needed."""

    def __init__(self, path: Path, *, headers: HeaderCache | None = None) -> None:
        """Stores the path, or raises `ConfigError` if it is not a run. `headers` caches headers of trajectories."""
        if not is_run(path):
            raise ConfigError(
                f"Expected a run directory, with {RunDir(path).episodes.name} or trajectories in it, got {path}."
            )
        self.path = path
        self.dir = RunDir(path)
        self._headers = headers

    @cached_property
    def summary(self) -> RunSummary:
        """The totals of the run; zero if the folder contains only trajectories."""
        return recorded_summary(self.dir) or RunSummary(planned=0, results=())

    @cached_property
    def stored(self) -> Mapping[str, StoredEpisode]:
        """The recorded trajectories of finished and running episodes, by episode id. Steps are not loaded yet."""
        return {one.episode_id: one for one in self._loaded}

    @cached_property
    def _loaded(self) -> StoredEpisodes:
        return load(self.path, partial=True, skip_broken=True, cache=self._headers)

    @property
    def state(self) -> RunState:
        """The state of the run, as computed from its files now."""
        lines = list(read_sessions(self.dir))
        started = [one["started"] for one in lines if isinstance(one.get("started"), int | float)]
        ends = [one for one in lines if isinstance(one.get("ended"), int | float)]
        has_end = bool(lines) and "ended" in lines[-1]
        name = "finished"
        if not has_end and lines:
            name = "running" if self.is_written else "killed"
        elif has_end and lines[-1].get("interrupted") is True:
            name = "interrupted"
        elif len(self.summary.finished) < self.summary.planned:
            name = "incomplete"
        return RunState(name, min(started, default=None), ends[-1]["ended"] if has_end else None, len(started))

    @property
    def elapsed_sec(self) -> float | None:
        """The total duration of all sessions so far, in seconds. `None` if it is not recorded, as for a killed run."""
        times = (one.get("started") for one in read_sessions(self.dir))
        started = [float(time_) for time_ in times if isinstance(time_, int | float)]
        if self.state.name == "running" and started:
            return self.summary.wall_sec + max(time.time() - started[-1], 0.0)
        return self.summary.wall_sec or None

    @property
    def is_written(self) -> bool:
        """Whether a process is executing this run.

        On this machine, the process holds a lock. If another machine executes the run, a file must have changed
        recently.
        """
        try:
            if has_writer(self.dir.episodes):
                return True
            newest = max(path.stat().st_mtime for path in (self.path, *self.path.iterdir()))
        except OSError:
            return False
        hosts = [one.get("hostname") for one in read_sessions(self.dir) if "started" in one]
        return hosts[-1:] != [socket.gethostname()] and time.time() - newest < QUIET_SEC

    def payload(self, *, name: str | None = None) -> dict[str, Any]:
        """Creates the payload of the run, without the steps of its episodes. By default, `name` is the run's path."""
        results, config = self._results(), self._config()
        recorded = object_or_empty(self.dir.replay)
        replay = {key: value for key, value in recorded.items() if not isinstance(value, list)}
        return {
            "name": name or str(self.path),
            "path": str(self.path),
            "state": asdict(self.state),
            "facts": [f"{key}={value}" for key, value in run_facts(self.dir).items()],
            "argv": command_line(self.dir),
            "elapsed_sec": self.elapsed_sec,
            "about": self._about(config, replay),
            "results": results,
            "intervals": self._intervals(),
            "episodes": [*map(self._row, self.summary.results), *self._without_a_row()],
            "config": config,
            "provenance": [
                [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
                for key, value in object_or_empty(self.dir.provenance).items()
                if key != "tasks"
            ],
            "replay": replay or None,
            "log": _tail(self.dir.log),
            "problems": list(self._loaded.left_out),
            "read_at": time.time(),
        }

    def episode(self, episode_id: str) -> dict[str, Any]:
        """Creates the payload of an episode with its steps. Raises `KeyError` if the episode has no trajectory."""
        stored = self.stored[episode_id]
        recorded = stored.load()
        rewards = with_added(recorded.rewards, added_rewards(self.dir).get(episode_id, {}))
        return {
            **episode_payload(
                replace(recorded, rewards=rewards),
                is_running=stored.outcome is None,
                files=episode_files(self.path, episode_id),
                changes=file_changes(self.path, episode_id),
            ),
            "path": str(stored.path),
        }

    def _results(self) -> dict[str, Any]:
        recorded = object_or_empty(self.dir.results)
        totals = recorded.get("totals")
        is_of_these = isinstance(totals, dict) and totals.get("tries") == len(self.summary.results)
        return recorded if is_of_these and "statistics" in recorded else results_document(self.summary)

    def _intervals(self) -> dict[str, Any]:
        """Returns the confidence interval of each task's mean reward, by task name, from the attempts at this task."""
        found = {
            task: mean_over_attempts([[one.reward for one in own if one.reward is not None]])
            for task, own in by_task(self.summary.scored).items()
        }
        return {task: json_ready([one.low, one.high]) for task, one in found.items() if one is not None}

    @cached_property
    def _started(self) -> float:
        times = [one.started_at for one in self.summary.results] + [one.start_time for one in self.stored.values()]
        return min(times, default=0.0)

    @cached_property
    def _final(self) -> set[int]:
        return {id(one) for one in self.summary.final}

    def _row(self, result: EpisodeResult) -> dict[str, Any]:
        data = result.to_dict()
        return {
            **{name: data[name] for name in OF_THE_ROW if data[name] not in (None, (), {}) or name == "reward"},
            "outcome": result.outcome.value,
            "is_last": id(result) in self._final,
            "from": round(result.started_at - self._started, 3),
            "seconds": round(result.duration_sec, 3),
            **self._of_the_trajectory(result.episode_id),
        }

    def _without_a_row(self) -> list[dict[str, Any]]:
        """Returns the episodes without a row in `episodes.jsonl`, because they are running or the run was killed."""
        known = {one.episode_id for one in self.summary.results}
        return [
            {
                "episode_id": one.episode_id,
                "task_name": one.task_name,
                "attempt": one.metadata.get("attempt", 0),
                "outcome": "running" if one.outcome is None else one.outcome.value,
                "reward": one.total_reward,
                "num_steps": one.step_count,
                "is_last": True,
                "from": round(one.start_time - self._started, 3),
                "seconds": round(one.end_time - one.start_time, 3),
                **self._of_the_trajectory(one.episode_id),
            }
            for one in self.stored.values()
            if one.episode_id not in known
        ]

    def _of_the_trajectory(self, episode_id: str) -> dict[str, Any]:
        stored = self.stored.get(episode_id)
        if stored is None:
            return {"has_steps": False}
        return {
            "has_steps": True,
            **{name: stored.metadata[name] for name in OF_THE_METADATA if stored.metadata.get(name) is not None},
        }

    def _about(self, config: Sequence[Sequence[str]], replay: Mapping[str, Any]) -> list[str]:
        """Returns phrases for special kinds of runs, for example a replay or a merged run."""
        told: dict[str, str] = {key: value for key, value in config if value != "null"}
        about = []
        if replay:
            matching, compared, score = (replay.get(name) for name in ("matching_steps", "compared_steps", "score"))
            about.append(f"replay of {replay.get('recording')}")
            if isinstance(score, int | float):
                about.append(f"{matching} of {compared} steps match ({score:.2f})")
        about += [
            f"scored again: {name} {format_estimate(mean)} over {count_of(mean.attempts, 'attempt')}"
            for name, mean in mean_scores(self.summary.results, added_rewards(self.dir))
        ]
        if "branch_from" in told:
            about.append(f"branches of {told['branch_from']}")
        if (parts := self.path / "parts").is_dir():
            about.append(f"merged from {sum(1 for _ in parts.iterdir())} runs")
        return about

    def _config(self) -> list[list[str]]:
        items = dotted_items(found) if (found := object_or_empty(self.dir.config)) else ()
        return [
            [key, value if isinstance(value, str) else json.dumps(value, default=str)]
            for key, value in islice(items, MAX_CONFIG_KEYS)
        ]


def payload_of(runs: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Creates the payload of a page from the payloads of its runs. `more` has other top-level keys, such as `sweep`."""
    from ares_exp import __version__

    return {"schema_version": SCHEMA_VERSION, "ares_exp": __version__, "made": time.time(), "runs": list(runs), **more}


def command_line(run: RunDir) -> str | None:
    """Returns the command line that started a run, which can be pasted into a shell; `None` if it is not recorded."""
    words = object_or_empty(run.provenance).get("argv")
    if not isinstance(words, list) or not words:
        return None
    program, *arguments = map(str, words)
    is_own = Path(program).name == PROGRAM or Path(program).parts[-2:] == ("ares_exp", "__main__.py")
    return shlex.join([PROGRAM if is_own else program, *arguments])


def _tail(path: Path) -> str:
    try:
        data = read_tail(path, LOG_BYTES + 1)
    except OSError:
        return ""
    text = data.decode(errors="backslashreplace")
    return text if len(data) <= LOG_BYTES else text.partition("\n")[2]
