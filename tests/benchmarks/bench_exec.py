"""What a command costs on Docker: our channel against docker-py's `exec_run` the way a plain implementation uses it.

Run by hand, with an engine: `python tests/benchmarks/bench_exec.py [IMAGE]`. The ways take turns in blocks, so that a
noisy machine is noisy for all of them. Prints medians, the 90th percentile and the ratio to the comparable `exec_run`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import docker

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.container import DockerContainer

ROUNDS, BLOCK, LIVES = 6, 20, 5
BOXES, SECONDS = 8, 4.0
LOGIN, PLAIN = ["bash", "-lc", "true"], ["true"]

Way = Callable[[], Awaitable[object]]


async def timed(way: Way) -> float:
    start = time.perf_counter()
    await way()
    return (time.perf_counter() - start) * 1000


def row(name: str, values: list[float], unit: str, against: list[float] | None = None) -> None:
    median, p90 = statistics.median(values), sorted(values)[int(len(values) * 0.9)]
    ratio = f"{statistics.median(against) / median:8.1f}x" if against else ""
    print(f"{name:44} {median:9.2f} {unit} (p90 {p90:.2f}, n={len(values)}) {ratio}")


async def latency(client: docker.DockerClient, login: DockerContainer, plain: DockerContainer) -> None:
    """One trivial command at a time."""
    peer = client.containers.get(login.container_name)
    ways: dict[str, tuple[Way, str | None]] = {
        "docker-py exec_run bash -lc true": (lambda: asyncio.to_thread(peer.exec_run, LOGIN), None),
        "docker-py exec_run true": (lambda: asyncio.to_thread(peer.exec_run, PLAIN), None),
        "channel bash -lc true": (lambda: login.exec("true"), "docker-py exec_run bash -lc true"),
        "channel bash -c true": (lambda: plain.exec("true"), "docker-py exec_run true"),
    }
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(ROUNDS + 1):
        for name, (way, _) in ways.items():
            block = [await timed(way) for _ in range(BLOCK)]
            if round_number:  # the first round warms up
                seen[name] += block
    for name, (_, against) in ways.items():
        row(name, seen[name], "ms", seen[against] if against else None)


async def throughput(client: docker.DockerClient, boxes: list[DockerContainer]) -> None:
    """Commands per second over several containers."""
    peers = [client.containers.get(box.container_name) for box in boxes]
    end = time.perf_counter() + SECONDS

    def drive_peer(peer: docker.models.containers.Container) -> int:
        count = 0
        while time.perf_counter() < end:
            peer.exec_run(LOGIN)
            count += 1
        return count

    async def drive(box: Container) -> int:
        count = 0
        while time.perf_counter() < end:
            await box.exec("true")
            count += 1
        return count

    with ThreadPoolExecutor(len(peers)) as threads:
        loop = asyncio.get_running_loop()
        theirs = sum(await asyncio.gather(*(loop.run_in_executor(threads, drive_peer, peer) for peer in peers)))
    end, cpu = time.perf_counter() + SECONDS, time.process_time()
    ours = sum(await asyncio.gather(*(drive(box) for box in boxes)))
    cpu = (time.process_time() - cpu) / ours * 1e6
    print(f"{f'docker-py bash -lc true, {BOXES} containers':44} {theirs / SECONDS:9.1f} per second")
    print(
        f"{f'channel bash -lc true, {BOXES} containers':44} {ours / SECONDS:9.1f} per second"
        f" {ours / theirs:27.1f}x ({cpu:.0f} us of our CPU each)"
    )


async def life(image: str) -> None:
    """Start to the first command, and teardown."""
    starts, stops = [], []
    for _ in range(LIVES):
        box = DockerContainerFactory()(ContainerSpec("bench", docker_image=image))

        async def begin(box: DockerContainer = box) -> None:
            await box.start()
            await box.exec("true")

        starts.append(await timed(begin))
        stops.append(await timed(box.stop))
    row("create + start + first command", starts, "ms")
    row("stop (kill and remove)", stops, "ms")


async def main(image: str) -> None:
    """All tables."""
    client = docker.from_env()
    factory, spec = DockerContainerFactory(), ContainerSpec("bench", docker_image=image)
    async with factory(spec) as login, DockerContainerFactory(shell="bash -c")(spec) as plain:
        await latency(client, login, plain)
    boxes = [factory(spec) for _ in range(BOXES)]
    try:
        await asyncio.gather(*(box.start() for box in boxes))
        await throughput(client, boxes)
    finally:
        await asyncio.gather(*(box.stop() for box in boxes))
    await life(image)
    client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
