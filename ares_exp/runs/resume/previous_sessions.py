"""Previous sessions of a run: their rows completed, and the attempts still owed.

A run that was killed leaves running episodes: a log of answers (`answer_log`) without a row, a trajectory without an
end. Each gets a row and an end with the outcome `lost`, and its attempt is owed a retry that reuses the logged answers.
An episode that had ended has its result in the log. A run that was interrupted leaves rows with the outcome
`cancelled`, and their logs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.records.environment_answers import recorded_usage
from ares_exp.records.episode_usage import EpisodeUsage
from ares_exp.records.recorded_results import read_results
from ares_exp.records.results import (
    ANSWERS_USED_UP,
    UNFINISHED,
    EnvironmentUsage,
    EpisodeResult,
    ErrorInfo,
    Outcome,
    Replayed,
    final_results,
)
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.runs.resume.episode_plan import PlannedEpisode, episode_seed
from ares_exp.trajectories.answer_log import SUFFIX, LoggedEpisode, logged_episodes
from ares_exp.trajectories.recorded_responses import answers

logger = logging.getLogger(__name__)

Slot = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PreviousSessions:
    """Known state of the run so far.

    Attributes:
        results: Every try that ended, or was lost.
        lost: Those whose row was written by this session.
        logs: The answers of attempts that have no result, by attempt.
        wall_sec: Seconds of earlier sessions.
    """

    results: tuple[EpisodeResult, ...] = ()
    lost: tuple[EpisodeResult, ...] = ()
    logs: Mapping[Slot, LoggedEpisode] = field(default_factory=dict)
    wall_sec: float = 0.0

    def owed(
        self, planned: Sequence[PlannedEpisode], *, run_seed: int, redo: Sequence[str] = ()
    ) -> list[PlannedEpisode]:
        """Returns the attempts still to be played, those that were running first.

        Args:
            planned: All planned attempts.
            run_seed: Seed of the run.
            redo: Outcomes that do not count as results: their attempts are played again.
        """
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


def load_previous_sessions(run_dir: RunDir, *, wall_sec: float = 0.0) -> PreviousSessions:
    """Completes the rows of episodes that were running, and returns the state of the run. Blocking.

    To be called by the run's only process. Killed in the middle, it can be called again.

    Raises:
        UserError: What the run recorded cannot be read.
        OSError: Its files cannot be written.
    """
    run_dir.sweep_up()
    recorded_results = read_results(run_dir.episodes)
    if recorded_results.torn:
        os.truncate(run_dir.episodes, recorded_results.whole_bytes)
    results = list(recorded_results.results)
    logs = logged_episodes(run_dir.answers)
    ended = {result.episode_id for result in results}
    _end_lost_trajectories(run_dir.path)
    lost = [log for log in logs if log.episode_id not in ended and log.has_started]
    in_progress = {log.slot for log in lost}
    never = [log for log in logs if not log.has_started and log.slot in in_progress]  # for a retry of these
    end_times = _end_times(run_dir.path, {log.episode_id for log in lost})
    new = [
        log.result or _lost(log, end_times.get(log.episode_id, 0.0), recorded_usage(run_dir.files / log.episode_id))
        for log in sorted(lost, key=lambda one: one.retry)
    ]
    for result in new:
        run_dir.append_episodes(dump_json(result.to_dict()))
    results += new
    return PreviousSessions(tuple(results), tuple(new), _latest(run_dir, logs, results, never), wall_sec)


def _latest(
    run_dir: RunDir, logs: Sequence[LoggedEpisode], results: Sequence[EpisodeResult], never: Sequence[LoggedEpisode]
) -> dict[Slot, LoggedEpisode]:
    """Returns the newest log of every attempt without a result; the others are deleted.

    The newest log may belong to an earlier try: a try that ended early has taken nothing over yet.
    """
    used_up = {(one.task_name, one.attempt) for one in final_results(results) if one.outcome in ANSWERS_USED_UP}
    useful = [log for log in logs if log.slot not in used_up and log not in never]
    newest = {log.slot: log for log in sorted(useful, key=lambda one: one.retry)}
    for log in logs:
        if newest.get(log.slot) is not log:
            (run_dir.answers / f"{log.episode_id}{SUFFIX}").unlink(missing_ok=True)
    return newest


def _lost(log: LoggedEpisode, end_time: float, used: EnvironmentUsage | None) -> EpisodeResult:
    """Returns the row of an episode whose process died before its end."""
    usage = EpisodeUsage()
    for answer in answers(log.exchanges):
        usage.add(answer)
    for answer in answers(log.ahead):
        usage.pay(answer)
    taken_over = [*answers(log.exchanges[: log.taken_over]), *log.ahead_taken_over]
    return EpisodeResult(
        episode_id=log.episode_id,
        task_name=log.task_name,
        attempt=log.attempt,
        seed=log.seed,
        outcome=Outcome.LOST,
        reward=None,
        error=ErrorInfo("lost", f"its process died after {usage.num_steps} answers"),
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
    """Ends the trajectories of lost episodes: while this session records, they would seem to be running."""
    from ares_exp.trajectories.files.episode_file import end_lost_episodes
    from ares_exp.trajectories.stored_episodes import find_files

    try:
        for file in [file for group in find_files(path) for file in group]:
            try:
                end_lost_episodes(file)
            except TrajectoryFormatError as error:
                logger.warning("%s", error)
    except TrajectoryFormatError as error:
        logger.info("There is no trajectory to end: %s", error)


def _end_times(path: Path, wanted: set[str]) -> dict[str, float]:
    """Returns when these episodes were last recorded, epoch seconds."""
    from ares_exp.trajectories.stored_episodes import load

    if not wanted:
        return {}
    try:
        return {one.episode_id: one.end_time for one in load(path, skip_broken=True) if one.episode_id in wanted}
    except (TrajectoryFormatError, UserError) as error:
        logger.info("There is no trajectory to read: %s", error)
        return {}
