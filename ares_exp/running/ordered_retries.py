"""Retries that an order asks for: further tries of attempts without a reward, with their recorded answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult, final_results
from ares_exp.records.run_dir import RunDir
from ares_exp.resume.answer_log import SUFFIX, LoggedEpisode
from ares_exp.resume.episode_plan import PlannedEpisode
from ares_exp.resume.previous_sessions import PreviousSessions, Slot


def plan_retries(
    run_dir: RunDir,
    planned: Sequence[PlannedEpisode],
    results: Sequence[EpisodeResult],
    busy: Collection[Slot],
    *,
    run_seed: int,
    what: str,
) -> list[PlannedEpisode]:
    """Plans further tries of attempts that have no reward, as a resume would. Blocking.

    Args:
        run_dir: Of the run.
        planned: All attempts of the run.
        results: All tries so far.
        busy: Attempts that play, or wait to.
        run_seed: Seed of the run.
        what: Task, or id of one of its tries.

    Raises:
        ConfigError: There is none of that name that could be.
    """
    slots = {(one.task_name, one.attempt) for one in results if one.episode_id == what}
    named = [one for one in planned if one.task_name == what or one.slot in slots]
    if not named:
        raise ConfigError(f"There is no task and no episode {what!r:.100} in this run.")
    last = {(one.task_name, one.attempt): one for one in final_results(results)}
    failed = [one for one in named if one.slot not in busy and (one.slot not in last or last[one.slot].reward is None)]
    if not failed:
        raise ConfigError(f"There is nothing to play again: each attempt of {what} has a reward, plays, or waits to.")
    ended = {one.slot: last[one.slot] for one in failed if one.slot in last}
    logs = {slot: log for slot, one in ended.items() if (log := _log(run_dir, one.episode_id)) is not None}
    redo = {one.outcome.value for one in ended.values()}
    return PreviousSessions(tuple(results), logs=logs).owed(failed, run_seed=run_seed, redo=[*redo])


def _log(run_dir: RunDir, episode_id: str) -> LoggedEpisode | None:
    try:
        return LoggedEpisode.read(run_dir.answers / f"{episode_id}{SUFFIX}")
    except (OSError, ValueError, RecursionError, StopIteration):
        return None
