"""Which episodes make no progress, and where they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ares_exp.playing import Playing

_NAMED = 3


@dataclass(slots=True)
class _Stall:
    since: float
    warn_after_sec: float


class Watchdog:
    """Says of each episode that nothing has happened in it for long: once, and again each time that that doubles.

    An episode makes progress when the policy has answered and when the environment asks again.
    """

    def __init__(self, stall_warn_sec: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Has seen nothing yet.

        Args:
            stall_warn_sec: Seconds without progress after which an episode is reported.
            clock: The clock of `Tally.since`.
        """
        self._stall_warn_sec = stall_warn_sec
        self._clock = clock
        self._stalls: dict[str, _Stall] = {}

    def check(self, episodes: Iterable[Playing]) -> list[str]:
        """What there is to report: a sentence for each place at which episodes wait."""
        now, seen, places = self._clock(), self._stalls, dict[str, list[tuple[float, Playing]]]()
        self._stalls = {}
        for playing in episodes:
            episode_id, since = playing.planned.episode_id, playing.tally.since
            stall = seen.get(episode_id)
            if stall is None or stall.since != since:
                stall = _Stall(since, self._stall_warn_sec)
            self._stalls[episode_id] = stall
            waited = now - since
            if waited >= stall.warn_after_sec:
                places.setdefault(_place(playing), []).append((waited, playing))
                while stall.warn_after_sec <= waited:
                    stall.warn_after_sec *= 2
        return [_sentence(place, stalled) for place, stalled in places.items()]


def _place(playing: Playing) -> str:
    """What the episode waits for; more exactly where its environment says which phase it is in."""
    phase = getattr(playing.environment, "phase", None)
    match playing.tally.waits_for, phase:
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


def _sentence(place: str, stalled: list[tuple[float, Playing]]) -> str:
    stalled.sort(key=lambda one: -one[0])
    waited, playing = stalled[0]
    if len(stalled) == 1:
        planned = playing.planned
        return (
            f"Episode {planned.episode_id} of task {planned.task_name} has waited {waited:.0f} s for {place} "
            f"(step {playing.tally.num_steps})."
        )
    named = [f"{one.planned.episode_id} (step {one.tally.num_steps})" for _, one in stalled[:_NAMED]]
    if len(stalled) > _NAMED:
        named.append(f"{len(stalled) - _NAMED} more")
    return f"{len(stalled)} episodes have waited up to {waited:.0f} s, each for {place}: {', '.join(named)}."
