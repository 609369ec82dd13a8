"""Counts of `ares-exp ctl`: how large and how dear the state is, a flood of garbage, and more and fewer at once.

`python -m tests.soak.control` prints a line for each.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from ares_exp.records.episode_usage import EpisodeUsage
from ares_exp.resume.episode_plan import plan_episodes
from ares_exp.running.control.live_status import LiveStatus
from ares_exp.running.control.orders import Order, write_order
from ares_exp.running.control.status import write_status
from ares_exp.running.running_episode import RunningEpisode
from ares_exp.running.scheduler import Scheduler
from tests.unit.running.test_run_control import controlled

MANY = 1_000
GARBAGE = 1_000


def state(path: Path) -> str:
    """Measures the state of a run of many episodes."""
    names = [f"some-project__some-project-{number}" for number in range(MANY)]
    usage = EpisodeUsage(num_steps=123, prompt_tokens=1_234_567, generated_tokens=12_345, cost=1.23456)
    planned = plan_episodes(names, attempts=1, seed=0)
    running = [RunningEpisode(usage=usage, waits_for="environment", planned=one) for one in planned]
    live = LiveStatus(lambda: running, Scheduler(MANY, None))  # type: ignore[arg-type]
    times = []
    for _ in range(20):
        began = time.perf_counter()
        status = live.read()
        times.append(time.perf_counter() - began)
    write_status(path, status)
    times.sort()
    return f"{MANY} episodes: {1000 * times[10]:.1f} ms in a thread, {path.stat().st_size / 1000:.0f} kB"


async def flood(path: Path) -> str:
    """Gives a run garbage of five kinds, and one order in the middle."""
    async with controlled(path, count=3) as run:
        await run.until(lambda: run.policy.asked and run.status is not None)
        inbox = path / "run" / "control"
        write_order(inbox, Order.new("pause"))
        for number in range(GARBAGE // 5):
            (inbox / f"0-{number}.json").write_text("{")
            (inbox / f"1-{number}.json").write_bytes(b"x" * 100_000)
            (inbox / f"2-{number}.json").symlink_to("/etc/passwd")
            (inbox / f"3-{number}.json").mkdir()
            (inbox / f"4-{number}.json").write_text('{"verb": "stop"}')
        began = time.monotonic()
        await run.until(lambda: not any(inbox.iterdir()) and any(line["verb"] == "pause" for line in run.noted()))
        took = time.monotonic() - began
        await run.order("resume")
        summary = await run.end()
    told = [line for line in run.noted() if line["verb"] is None]
    return f"{GARBAGE} files of garbage: gone in {took:.1f} s, {len(told)} warnings, {len(summary.scored)} of 3 scored"


async def sizes(path: Path) -> str:
    """Changes the number of episodes at once, from 4 to 32 and to 2."""
    async with controlled(path, count=200, concurrency=4) as run:
        await run.until(lambda: len(run.policy.asked) == 4)
        began = time.monotonic()
        await run.order("set", values={"concurrency": 32})
        await run.until(lambda: len(run.policy.asked) == 32)
        grown = time.monotonic() - began
        await run.order("set", values={"concurrency": 2})
        summary = await run.end()
    outcomes = {one.outcome.value for one in summary.results}
    return f"4 to 32 at once in {grown:.1f} s, then 2: {len(summary.scored)} of 200 scored, outcomes {outcomes}"


def main() -> None:
    """Prints the lines."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(state(folder / "status.json"))
        for name, measured in (("flood", flood), ("sizes", sizes)):
            (folder / name).mkdir()
            print(asyncio.run(measured(folder / name)))


if __name__ == "__main__":
    main()
