"""Which episodes the watchdog reports, when, and what it says: on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.environment import EpisodeReport
from ares_exp.policies.episode_events import WaitsFor
from ares_exp.records.results import EpisodeUsage
from ares_exp.runs.control.runner_monitor import Watchdog
from ares_exp.runs.resume.episode_plan import PlannedEpisode
from ares_exp.runs.running_episode import RunningEpisode


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def running(
    name: str, waits_for: WaitsFor, *, since: float = 0.0, steps: int = 0, phase: str | None = None
) -> RunningEpisode:
    environment: Any = SimpleNamespace(report=lambda: EpisodeReport(phase=phase))
    return RunningEpisode(
        planned=PlannedEpisode(name, "fix-bug", 0, 0),
        usage=EpisodeUsage(num_steps=steps),
        waits_for=waits_for,
        since=since,
        environment=environment,
    )


def test_a_stall_is_reported_once_and_again_when_it_has_doubled(clock: Clock) -> None:
    watchdog, stuck = Watchdog(600, clock=clock), running("e1", "policy", steps=12)
    reported = {}
    for clock.now in range(0, 5001, 10):
        if sentences := watchdog.check([stuck]):
            reported[clock.now] = sentences
    assert [*reported] == [600, 1200, 2400, 4800]
    assert reported[600] == ["Episode e1 of task fix-bug has waited 600 s for the policy (step 12)."]


def test_progress_starts_the_count_anew(clock: Clock) -> None:
    watchdog, slow = Watchdog(600, clock=clock), running("e1", "policy")
    clock.now = 700
    assert len(watchdog.check([slow])) == 1
    slow.since, slow.waits_for = 710, "environment"
    clock.now = 1309
    assert watchdog.check([slow]) == []
    clock.now = 1310
    assert len(watchdog.check([slow])) == 1


def test_an_episode_that_ended_is_forgotten(clock: Clock) -> None:
    watchdog, stuck = Watchdog(600, clock=clock), running("e1", "policy")
    clock.now = 600
    assert len(watchdog.check([stuck])) == 1
    assert watchdog.check([]) == []
    assert len(watchdog.check([stuck])) == 1


def test_after_a_long_pause_there_is_one_report_not_one_for_each_doubling(clock: Clock) -> None:
    watchdog, stuck = Watchdog(600, clock=clock), running("e1", "policy")
    clock.now = 10_000
    assert len(watchdog.check([stuck])) == 1
    assert watchdog.check([stuck]) == []


@pytest.mark.parametrize(
    ("waits_for", "phase", "place"),
    [
        ("start", None, "its start"),
        ("start", "start", "its container to start"),
        ("start", "agent", "its agent's first request"),
        ("policy", None, "the policy"),
        ("environment", None, "its environment"),
        ("environment", "agent", "its agent, at work in the container"),
        ("environment", "verify", "its verifier"),
        ("end", None, "its resources to be released"),
    ],
)
def test_the_place_is_named(clock: Clock, waits_for: WaitsFor, phase: str | None, place: str) -> None:
    clock.now = 61
    assert Watchdog(60, clock=clock).check([running("e1", waits_for, phase=phase)]) == [
        f"Episode e1 of task fix-bug has waited 61 s for {place} (step 0)."
    ]


def test_an_environment_that_is_not_made_yet_or_says_nothing_will_do(clock: Clock) -> None:
    clock.now = 61
    bare = running("e1", "start")
    bare.environment = None
    assert "for its start" in Watchdog(60, clock=clock).check([bare])[0]


def test_many_at_one_place_are_one_sentence(clock: Clock) -> None:
    clock.now = 1000
    stuck = [running(f"e{number}", "policy", since=number, steps=number) for number in range(40)]
    verifying = running("v", "environment", phase="verify")
    first, second = Watchdog(600, clock=clock).check([*stuck, verifying])
    assert first == (
        "40 episodes have waited up to 1000 s, each for the policy: e0 (step 0), e1 (step 1), e2 (step 2), 37 more."
    )
    assert second.startswith("Episode v ")
