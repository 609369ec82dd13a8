"""Detection of episodes without progress, and of the place where they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ares_exp.runs.running_episode import RunningEpisode

_NAMED = 3


@dataclass(slots=True)
class _Stall:
    since: float
    warn_after_sec: float


class Watchdog:
    """Reports each episode without progress once, and again each time that the waiting time has doubled.

    An episode makes progress when the policy has answered and when the environment asks again.
    """

    def __init__(self, stall_warn_sec: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Keeps the arguments.

        Args:
            stall_warn_sec: Seconds without progress after which an episode is reported.
            clock: The clock of `EpisodeEvents.since`.
        """
        self._stall_warn_sec = stall_warn_sec
        self._clock = clock
        self._stalls: dict[str, _Stall] = {}

    def check(self, episodes: Iterable[RunningEpisode]) -> list[str]:
        """Returns the new warnings: one sentence for each place where episodes wait."""
        now, seen, places = self._clock(), self._stalls, dict[str, list[tuple[float, RunningEpisode]]]()
        self._stalls = {}
        for episode in episodes:
            episode_id, since = episode.planned.episode_id, episode.since
            stall = seen.get(episode_id)
            if stall is None or stall.since != since:
                stall = _Stall(since, self._stall_warn_sec)
            self._stalls[episode_id] = stall
            waited = now - since
            if waited >= stall.warn_after_sec:
                places.setdefault(_place(episode), []).append((waited, episode))
                while stall.warn_after_sec <= waited:
                    stall.warn_after_sec *= 2
        return [_sentence(place, stalled) for place, stalled in places.items()]


def _place(episode: RunningEpisode) -> str:
    """Names the place where the episode waits, with the phase where its environment reports one."""
    match episode.waits_for, episode.report().phase:
        case "start", "start":
            return "its container to start"
        case "start", "agent":
            return "its agent's first request"
        case "start", _:
            return "its start"
        case "policy", _:
            return "the policy"
        case "environment", "agent":
            return "its agent, at work in the container"
        case "environment", "verify":
            return "its verifier"
        case "environment", _:
            return "its environment"
        case _:
            return "its resources to be released"


def _sentence(place: str, stalled: list[tuple[float, RunningEpisode]]) -> str:
    stalled.sort(key=lambda one: -one[0])
    waited, episode = stalled[0]
    if len(stalled) == 1:
        planned = episode.planned
        return (
            f"Episode {planned.episode_id} of task {planned.task_name} has waited {waited:.0f} s for {place} "
            f"(step {episode.usage.num_steps})."
        )
    named = [f"{one.planned.episode_id} (step {one.usage.num_steps})" for _, one in stalled[:_NAMED]]
    if len(stalled) > _NAMED:
        named.append(f"{len(stalled) - _NAMED} more")
    return f"{len(stalled)} episodes have waited up to {waited:.0f} s, each for {place}: {', '.join(named)}."
