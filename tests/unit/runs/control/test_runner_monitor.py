"""The monitor: figures of the process, the lag of a real event loop, and episodes that are stuck."""

import asyncio
import gc
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.environment import EpisodeReport
from ares_exp.policies.episode_events import WaitsFor
from ares_exp.records.results import EpisodeUsage
from ares_exp.runs.control.runner_monitor import LoopLag, ProcessFigures, RunnerMonitor, Watchdog
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode


def running(name: str, waits_for: WaitsFor, *, since: float = 0.0, steps: int = 0, **report: Any) -> RunningEpisode:
    environment: Any = SimpleNamespace(report=lambda: EpisodeReport(**report))
    return RunningEpisode(
        planned=PlannedEpisode(name, "fix-bug", 0, 0),
        usage=EpisodeUsage(num_steps=steps),
        waits_for=waits_for,
        since=since,
        environment=environment,
    )


async def test_sample_counts_waits_and_process_figures() -> None:
    samples: list[Mapping[str, float]] = []
    bare = running("e4", "start", since=-10_000)
    bare.environment = None
    episodes = [
        running("e1", "policy", has_container=True),
        running("e2", "policy", has_container=True),
        running("e3", "start", since=-10_000),
        bare,
    ]
    async with RunnerMonitor(lambda: episodes, samples.append, print, queued=lambda: 7) as monitor:
        pass
    (sample,) = samples
    assert {name.partition("/")[0] for name in sample} == {"system"}
    assert sample["system/episodes_running"] == 4
    assert sample["system/episodes_waiting_policy"] == 2
    assert sample["system/episodes_waiting_start"] == 2
    assert sample["system/episodes_waiting_environment"] == 0
    assert sample["system/containers"] == 2
    assert sample["system/queue"] == 7
    assert sample["system/threads"] >= 2
    assert sample["system/loop_lag_sec"] <= monitor.max_loop_lag_sec
    assert monitor.failures == 0


async def test_samples_and_warnings_arrive_during_the_run() -> None:
    sampled, warned = asyncio.Event(), asyncio.Event()
    sentences: list[str] = []

    def warn(sentence: str) -> None:
        sentences.append(sentence)
        warned.set()

    stuck = [running("e1", "policy", since=-10_000)]
    async with RunnerMonitor(lambda: stuck, lambda sample: sampled.set(), warn, interval_sec=0.01, stall_warn_sec=600):
        await sampled.wait()
        await warned.wait()
        sampled.clear()
        await sampled.wait()
    assert len(sentences) == 1
    assert "e1" in sentences[0]


async def test_failed_report_is_only_counted() -> None:
    calls = 0
    thrice = asyncio.Event()

    def report(sample: Mapping[str, float]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            thrice.set()
        raise OSError("no space")

    async with RunnerMonitor(list, report, print, interval_sec=0.01) as monitor:
        await thrice.wait()
    assert monitor.failures >= 3


async def test_monitor_always_sends_a_last_sample() -> None:
    samples: list[Mapping[str, float]] = []
    inside = asyncio.Event()

    async def run() -> None:
        async with RunnerMonitor(list, samples.append, print):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert len(samples) == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert "loop-lag" not in {thread.name for thread in threading.enumerate()}


def test_process_figures_are_sampled() -> None:
    gc.collect()  # files that other tests forgot
    figures = ProcessFigures()
    before = figures.take()
    held = [open("/dev/null", "rb") for _ in range(5)]  # noqa: PTH123, SIM115
    after = figures.take()
    for file in held:
        file.close()
    assert after["system/open_files"] == before["system/open_files"] + 5
    assert after["system/threads"] >= 1
    assert after["system/cpu_percent"] >= 0
    assert after.get("system/rss_mb", 1000) > 5


PATIENCE_SEC = 60


def _no_warning(sentence: str) -> None:
    raise AssertionError(sentence)


async def test_loop_lag_measures_a_blocked_loop() -> None:
    lag = LoopLag(_no_warning, tick_sec=0.01, blocked_sec=PATIENCE_SEC)
    lag.start()
    try:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        longest, mean = lag.take()
    finally:
        lag.stop()
    assert longest >= 0.19
    assert 0 < mean <= longest
    assert lag.max_sec == longest


async def test_take_resets_the_lag() -> None:
    now = [0.0]
    lag = LoopLag(_no_warning, tick_sec=3600, clock=lambda: now[0], blocked_sec=10**6)
    lag.start()
    try:
        assert lag.take() == (0.0, 0.0)
        now[0] = 3600 + 7.0
        assert lag.take() == (7.0, 7.0)
        now[0] = 3600.0
        assert lag.take() == (0.0, 0.0)
        assert lag.max_sec == 7.0
    finally:
        lag.stop()


async def test_blocked_loop_is_reported_during_the_block() -> None:
    sentences: list[str] = []
    warned, ran = threading.Event(), asyncio.Event()

    def warn(sentence: str) -> None:
        sentences.append(sentence)
        warned.set()

    def hangs_here() -> None:
        if warned.wait(PATIENCE_SEC):
            ran.set()

    lag = LoopLag(warn, tick_sec=0.01, look_sec=0.01, blocked_sec=0.1)
    lag.start()
    try:
        asyncio.get_running_loop().call_soon(hangs_here)
        await ran.wait()
    finally:
        lag.stop()
    assert "hangs_here" in sentences[0]
    assert "test_runner_monitor.py" in sentences[0]
    assert "base_events" not in sentences[0]


@pytest.mark.parametrize(
    ("look_takes_sec", "looks", "reports"),
    [(0.5, 40, 1), (1000.0, 5, 0)],
    ids=["a block is reported once", "a stopped process is not reported"],
)
async def test_thread_reports_stalls_missed_by_the_loop(look_takes_sec: float, looks: int, reports: int) -> None:
    sentences: list[str] = []
    now, looked = [0.0], threading.Semaphore(0)

    def clock() -> float:
        if threading.current_thread().name == "loop-lag":
            now[0] += look_takes_sec
            looked.release()
        return now[0]

    lag = LoopLag(sentences.append, tick_sec=0.01, look_sec=0.001, blocked_sec=5, clock=clock)
    lag.start()
    try:
        for _ in range(looks):  # this holds up the loop
            assert looked.acquire(timeout=PATIENCE_SEC)
    finally:
        lag.stop()
    assert len(sentences) == reports


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_stall_is_reported_again_when_doubled(clock: Clock) -> None:
    watchdog, stuck = Watchdog(600, clock=clock), running("e1", "policy", steps=12)
    reported = {}
    for clock.now in range(0, 5001, 10):
        if sentences := watchdog.check([stuck]):
            reported[clock.now] = sentences
    assert [*reported] == [600, 1200, 2400, 4800]
    assert reported[600] == ["Episode e1 of task fix-bug has waited 600 s for the policy (step 12)."]


def test_progress_resets_the_stall_timer(clock: Clock) -> None:
    watchdog, slow = Watchdog(600, clock=clock), running("e1", "policy")
    clock.now = 700
    assert len(watchdog.check([slow])) == 1
    slow.since, slow.waits_for = 710, "environment"
    clock.now = 1309
    assert watchdog.check([slow]) == []
    clock.now = 1310
    assert len(watchdog.check([slow])) == 1


def test_ended_episode_is_forgotten(clock: Clock) -> None:
    watchdog, stuck = Watchdog(600, clock=clock), running("e1", "policy")
    clock.now = 600
    assert len(watchdog.check([stuck])) == 1
    assert watchdog.check([]) == []
    assert len(watchdog.check([stuck])) == 1


@pytest.mark.parametrize(
    ("waits_for", "phase", "place"),
    [
        ("start", None, "its start"),
        ("start", "start", "its container to start"),
        ("start", "agent", "its agent's first request"),
        ("policy", None, "the policy"),
        ("environment", None, "its environment"),
        ("environment", "agent", "its agent, which is working in the container"),
        ("environment", "verify", "its verifier"),
        ("end", None, "its resources to be released"),
    ],
)
def test_stall_report_names_the_phase(clock: Clock, waits_for: WaitsFor, phase: str | None, place: str) -> None:
    clock.now = 61
    assert Watchdog(60, clock=clock).check([running("e1", waits_for, phase=phase)]) == [
        f"Episode e1 of task fix-bug has waited 61 s for {place} (step 0)."
    ]


def test_many_stalls_give_one_sentence(clock: Clock) -> None:
    clock.now = 1000
    stuck = [running(f"e{number}", "policy", since=number, steps=number) for number in range(40)]
    verifying = running("v", "environment", phase="verify")
    first, second = Watchdog(600, clock=clock).check([*stuck, verifying])
    assert first == (
        "40 episodes have waited up to 1000 s, each for the policy: e0 (step 0), e1 (step 1), e2 (step 2), 37 more."
    )
    assert second.startswith("Episode v ")
