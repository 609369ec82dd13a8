"""Many sandboxes of the Daytona service at once, from one event loop; and what one command costs, in several ways.

Run by hand: `python -m tests.benchmarks.bench_daytona [--count N]`. The service is the emulator, in a process of its
own, whose sandboxes are local boxes: it shares the processors with us, so that what takes long is mostly its work. What
is ours is in the columns of processor time, threads, lag of the event loop, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory

SPEC = ContainerSpec("bench", docker_image="debian:12.9", start_timeout_sec=1200)
COMMANDS, FILE_BYTES, ROUNDS = 5, 100_000, 100
SAMPLE_SEC = 0.01


class Meter:
    """What this process does while its context lasts: wall and processor seconds, requests, threads, lag, memory."""

    def __init__(self, requests: list[str]) -> None:
        self._requests = requests
        self.threads = 0
        self.lag_sec = self.lag_cpu_sec = 0.0

    async def __aenter__(self) -> Meter:
        self._started, self._cpu, self._asked = time.perf_counter(), time.process_time(), len(self._requests)
        self._sampler = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sampler.cancel()
        self.wall_sec, self.cpu_sec = time.perf_counter() - self._started, time.process_time() - self._cpu
        self.asked = len(self._requests) - self._asked
        self.rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async def _sample(self) -> None:
        while True:
            slept_at, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(SAMPLE_SEC)
            lag_sec = time.perf_counter() - slept_at - SAMPLE_SEC
            if lag_sec > self.lag_sec:
                self.lag_sec, self.lag_cpu_sec = lag_sec, time.process_time() - cpu
            self.threads = max(self.threads, threading.active_count())

    def row(self, what: str, count: int, times_sec: list[float]) -> str:
        cuts = statistics.quantiles(times_sec, n=20) if len(times_sec) > 1 else [times_sec[0]] * 19
        return (
            f"| {what} | {count} | {count / self.wall_sec:.1f} | {cuts[9] * 1000:.0f} | {cuts[18] * 1000:.0f} "
            f"| {self.asked / count:.1f} | {self.cpu_sec / count * 1000:.1f} | {self.threads} "
            f"| {self.lag_sec * 1000:.0f}, {self.lag_cpu_sec * 1000:.0f} | {self.rss / 1e6:.0f} |"
        )


HEADER = (
    "| what | how many | per second | p50 ms | p95 ms | requests each | our CPU ms each "
    "| threads | longest lag ms, our CPU in it | RSS MB |\n|---|---|---|---|---|---|---|---|---|---|"
)


@contextlib.contextmanager
def emulator(distance_ms: float) -> Iterator[None]:
    """The service, in a process of its own; the variables lead to it."""
    command = [sys.executable, "-m", "tests.daytona.emulator", "--distance-ms", str(distance_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        for word in process.stdout.readline().split()[1:]:
            name, _, value = word.partition("=")
            os.environ[name] = value
        yield
    finally:
        process.terminate()
        process.wait(300)


async def timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def many(count: int, factory: DaytonaContainerFactory, requests: list[str], directory: Path) -> None:
    """So many sandboxes, all at the same time, phase by phase."""
    print(HEADER)
    boxes = [factory(SPEC) for _ in range(count)]
    (directory / "file").write_bytes(os.urandom(FILE_BYTES))

    async def phase(what: str, works: Callable[[int], list[Awaitable[object]]]) -> None:
        async def one(number: int) -> list[float]:
            return [await timed(work) for work in works(number)]

        async with Meter(requests) as meter:
            times = [t for found in await asyncio.gather(*map(one, range(count))) for t in found]
        print(meter.row(what, len(times), times), flush=True)

    try:
        await phase("create and start", lambda n: [boxes[n].start()])
        await phase("command", lambda n: [boxes[n].exec("echo 1", shell="sh -c") for _ in range(COMMANDS)])
        await phase("command of 1 s", lambda n: [boxes[n].exec("sleep 1", shell="sh -c")])
        await phase("upload 100 KB", lambda n: [boxes[n].upload(directory / "file", "/file")])
        await phase("download 100 KB", lambda n: [boxes[n].download("/file", directory / str(n))])
        await phase("delete", lambda n: [boxes[n].stop()])
    finally:
        await asyncio.gather(*(box.stop() for box in boxes))


async def alone(factory: DaytonaContainerFactory, requests: list[str]) -> None:
    """One sandbox, one command after the other, in the ways that there are."""
    print(f"\n{HEADER}")
    async with factory(SPEC) as box:
        assert isinstance(box, DaytonaContainer)
        assert box._sandbox is not None
        process: Any = box._sandbox.process
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "ours, sh -c": lambda: box.exec("echo 1", shell="sh -c"),
            "ours, bash -c": lambda: box.exec("echo 1"),
            "process.exec": lambda: process.exec("echo 1"),
        }
        for name, way in ways.items():
            await way()
            async with Meter(requests) as meter:
                times = [await timed(way()) for _ in range(ROUNDS)]
            print(meter.row(name, ROUNDS, times), flush=True)


@contextlib.asynccontextmanager
async def counted(factory: DaytonaContainerFactory) -> AsyncIterator[list[str]]:
    """One connection of the factory, and the requests that go over it."""
    requests: list[str] = []

    async def note(_: object, __: object, sent: aiohttp.TraceRequestStartParams) -> None:
        requests.append(f"{sent.method} {sent.url.path}")

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(note)
    trace.freeze()
    connection = factory._connections.acquire()
    try:
        await factory.preflight()
        session = connection.service.client._shared_session.session
        assert session is not None
        session.trace_configs.append(trace)
        yield requests
    finally:
        await factory._connections.release(connection)


async def main(count: int) -> None:
    factory = DaytonaContainerFactory()
    async with counted(factory) as requests:
        await alone(factory, requests)
        if count == 0:
            return
        print(f"\nload average {os.getloadavg()[0]:.1f} before {count} sandboxes\n")
        with tempfile.TemporaryDirectory() as directory:
            await many(count, factory, requests, Path(directory))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="sandboxes at the same time; 0: only one, alone")
    parser.add_argument("--distance-ms", type=float, default=0, help="how much later each request arrives there")
    given = parser.parse_args()
    with emulator(given.distance_ms):
        asyncio.run(main(given.count))
