"""The monitor on a real event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ares_exp.environment import EpisodeReport
from ares_exp.policies.episode_events import WaitsFor
from ares_exp.runs.control.runner_monitor import ProcessFigures, RunnerMonitor
from ares_exp.runs.resume.episode_plan import PlannedEpisode
from ares_exp.runs.running_episode import RunningEpisode


def running(name: str, waits_for: WaitsFor, *, has_container: bool = True) -> RunningEpisode:
    environment: Any = SimpleNamespace(report=lambda: EpisodeReport(has_container=has_container))
    planned, since = PlannedEpisode(name, "task", 0, 0), time.monotonic() - 10_000
    return RunningEpisode(planned=planned, waits_for=waits_for, since=since, environment=environment)


async def test_a_sample_says_what_episodes_wait_for_and_how_the_process_does() -> None:
    samples: list[Mapping[str, float]] = []
    bare = running("e4", "start")
    bare.environment = None
    episodes = [running("e1", "policy"), running("e2", "policy"), running("e3", "start", has_container=False), bare]
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


async def test_samples_and_warnings_come_while_the_run_goes_on() -> None:
    sampled, warned = asyncio.Event(), asyncio.Event()
    sentences: list[str] = []

    def warn(sentence: str) -> None:
        sentences.append(sentence)
        warned.set()

    stuck = [running("e1", "policy")]
    async with RunnerMonitor(lambda: stuck, lambda sample: sampled.set(), warn, interval_sec=0.01, stall_warn_sec=600):
        await sampled.wait()
        await warned.wait()
        sampled.clear()
        await sampled.wait()
    assert len(sentences) == 1
    assert "e1" in sentences[0]


async def test_a_report_that_fails_fails_nothing_else() -> None:
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


async def test_the_last_sample_comes_and_nothing_stays_behind_whatever_ends_the_body() -> None:
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


def test_figures_of_the_process() -> None:
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
