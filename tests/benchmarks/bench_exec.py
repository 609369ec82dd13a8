"""What a command costs on Docker: our channels against docker-py's `exec_run` the way a plain implementation uses it.

Run by hand, with an engine: `python -m tests.benchmarks.bench_exec [IMAGE]`. The ways take turns in blocks, so that a
noisy machine is noisy for all of them.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import docker

from ares_exp.containers.container import Container, ContainerSpec, Shell
from ares_exp.containers.docker import DockerContainerFactory
from tests.benchmarks import comparison

ROUNDS, BLOCK = 8, 20
PAUSE_SEC = 0.01
SECONDS = 4.0
AT_ONCE_ROUNDS = 3
SHELLS: tuple[Shell, ...] = ("bash -c", "sh -c", "bash -lc")

Way = Callable[[], Awaitable[object]]


async def latency(client: docker.DockerClient, image: str) -> None:
    """One trivial command after another: with a short pause, as between an agent's, and back to back."""
    spec = ContainerSpec("bench", docker_image=image)
    async with DockerContainerFactory()(spec) as box:
        peer = client.containers.get(box.container_name)
        ways: dict[str, Way] = {"apart": lambda: box.exec("true", separate_stderr=True)}
        for shell in SHELLS:
            ways[shell] = lambda shell=shell: box.exec("true", shell=shell)  # type: ignore[misc]
            ways[f"peer {shell}"] = lambda shell=shell: asyncio.to_thread(  # type: ignore[misc]
                peer.exec_run, [*shell.split(), "true"]
            )
        for pause, when in ((PAUSE_SEC, f"{PAUSE_SEC * 1000:.0f} ms after the last"), (0.0, "back to back")):
            seen = await _in_turns(ways, pause)
            comparison.latency(f"command in `bash -c`, stderr apart, {when}", seen["peer bash -c"], seen["apart"])
            for shell in SHELLS:
                comparison.latency(f"command in `{shell}`, {when}", seen[f"peer {shell}"], seen[shell])


async def _in_turns(ways: dict[str, Way], pause_sec: float) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(ROUNDS + 1):
        for name, way in ways.items():
            for _ in range(BLOCK):
                took, _ = await comparison.timed(way)
                if round_number:  # the first round warms up
                    seen[name].append(took)
                await asyncio.sleep(pause_sec)
    return seen


async def throughput(client: docker.DockerClient, image: str, boxes: int) -> None:
    """Commands per second over several containers, ours from one event loop."""
    spec = ContainerSpec("bench", docker_image=image)
    started = [DockerContainerFactory()(spec) for _ in range(boxes)]
    try:
        await asyncio.gather(*(box.start() for box in started))
        peers = [client.containers.get(box.container_name) for box in started]
        with ThreadPoolExecutor(boxes) as threads:
            loop, end = asyncio.get_running_loop(), time.perf_counter() + SECONDS
            drives = (loop.run_in_executor(threads, _drive_peer, peer, end) for peer in peers)
            theirs = sum(await asyncio.gather(*drives)) / SECONDS
        await asyncio.gather(*(box.exec("true") for box in started for _ in range(2)))  # its second shell is open
        end = time.perf_counter() + SECONDS
        ours = sum(await asyncio.gather(*(_drive(box, end) for box in started))) / SECONDS
    finally:
        await asyncio.gather(*(box.stop() for box in started))
    comparison.throughput(f"`bash -c` commands per second, {boxes} containers", theirs, ours)


def _drive_peer(peer: docker.models.containers.Container, end: float) -> int:
    count = 0
    while time.perf_counter() < end:
        peer.exec_run([*SHELLS[0].split(), "true"])
        count += 1
    return count


async def _drive(box: Container, end: float) -> int:
    count = 0
    while time.perf_counter() < end:
        await box.exec("true")
        count += 1
    return count


async def at_once(client: docker.DockerClient, image: str, commands: int) -> None:
    theirs, ours = [], []
    for _ in range(AT_ONCE_ROUNDS):
        async with DockerContainerFactory()(ContainerSpec("bench", docker_image=image)) as box:
            peer = client.containers.get(box.container_name)
            await box.exec("true")
            with ThreadPoolExecutor(commands) as threads:
                run = partial(asyncio.get_running_loop().run_in_executor, threads, peer.exec_run)
                theirs.append(await _all(run([*SHELLS[0].split(), "true"]) for _ in range(commands)))
            ours.append(await _all(box.exec("true") for _ in range(commands)))
    comparison.latency(f"{commands} `bash -c` commands at once, until the last", theirs, ours)


async def _all(commands: Iterable[Awaitable[object]]) -> float:
    took, _ = await comparison.timed(lambda: asyncio.gather(*commands))
    return took


async def main(image: str) -> None:
    client = docker.from_env(max_pool_size=32)
    await latency(client, image)
    for boxes in (8, 32):
        await throughput(client, image, boxes)
    await at_once(client, image, 64)
    client.close()


if __name__ == "__main__":
    print(comparison.HEADER)
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
