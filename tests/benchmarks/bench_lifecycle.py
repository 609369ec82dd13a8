"""What the life of a Docker container costs: ours beside docker-py used the plain way.

Run by hand, with an engine: `python -m tests.benchmarks.bench_lifecycle [IMAGE]`. The ways take turns, so that a noisy
machine is noisy for all of them.
"""

import asyncio
import io
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import docker

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from tests.benchmarks.comparison import HEADER, latency, timed

LIVES, GRACEFUL_STOPS, AT_ONCE, FILES, UPLOADS = 10, 2, 32, 50, 3
FOR_EVER, COMMAND = ["tail", "-f", "/dev/null"], ["bash", "-c", "true"]

Peer = Any  # docker-py's container


async def start_peer(client: docker.DockerClient, image: str) -> Peer:
    def start() -> Peer:
        peer = client.containers.run(image, FOR_EVER, detach=True)
        peer.exec_run(COMMAND)
        return peer

    return await asyncio.to_thread(start)


def stop_peer(peer: Peer) -> None:
    peer.stop()
    peer.remove(force=True)


async def start_ours(factory: DockerContainerFactory, spec: ContainerSpec) -> Container:
    box = factory(spec)
    await box.start()
    await box.exec("true")
    return box


async def life(client: docker.DockerClient, factory: DockerContainerFactory, spec: ContainerSpec) -> None:
    starts: list[float] = []
    peer_starts: list[float] = []
    stops: list[float] = []
    peer_stops: list[float] = []
    for turn in range(LIVES + 1):
        took_theirs, peer = await timed(lambda: start_peer(client, spec.docker_image or ""))
        if 0 < turn <= GRACEFUL_STOPS:
            stopped, _ = await timed(partial(asyncio.to_thread, stop_peer, peer))
            peer_stops.append(stopped)
        else:
            await asyncio.to_thread(peer.remove, force=True)
        took_ours, box = await timed(lambda: start_ours(factory, spec))
        stopped_ours, _ = await timed(box.stop)
        if turn:  # the first warms up
            peer_starts.append(took_theirs)
            starts.append(took_ours)
            stops.append(stopped_ours)
    latency("create, start and a first command", peer_starts, starts)
    latency("stop / theirs `stop()` and `remove()`", peer_stops, stops)


async def at_once(client: docker.DockerClient, factory: DockerContainerFactory, spec: ContainerSpec) -> None:
    theirs: list[float] = []
    ours: list[float] = []
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE))
    for _ in range(2):
        took, peers = await timed(partial(many, partial(start_peer, client, spec.docker_image or "")))
        theirs.append(took)
        await asyncio.gather(*(asyncio.to_thread(peer.remove, force=True) for peer in peers))
        took, boxes = await timed(partial(many, partial(start_ours, factory, spec)))
        ours.append(took)
        await asyncio.gather(*(box.stop() for box in boxes))
    latency(f"{AT_ONCE} at once, until the last has run a command", theirs, ours)


async def many(start: Callable[[], Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*(start() for _ in range(AT_ONCE)))


async def uploads(client: docker.DockerClient, factory: DockerContainerFactory, spec: ContainerSpec) -> None:
    a_file_each: list[float] = []
    one_archive: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for n in range(FILES):
            path = Path(directory) / f"d{n % 5}" / f"f{n}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * 200)
        async with factory(spec) as box:
            peer = client.containers.get(box.container_name)  # type: ignore[attr-defined]

            def one_by_one(target: str) -> None:
                for path in sorted(Path(directory).rglob("f*")):
                    where = f"{target}/{path.parent.name}"
                    peer.exec_run(["mkdir", "-p", where])
                    packed = io.BytesIO()
                    with tarfile.open(fileobj=packed, mode="w") as archive:
                        archive.add(path, path.name)
                    peer.put_archive(where, packed.getvalue())

            for n in range(UPLOADS):
                took, _ = await timed(lambda n=n: asyncio.to_thread(one_by_one, f"/a{n}"))  # type: ignore[misc]
                a_file_each.append(took)
                for m in range(5):
                    took, _ = await timed(lambda n=n, m=m: box.upload(directory, f"/b{n}{m}"))  # type: ignore[misc]
                    one_archive.append(took)
    latency(f"upload of {FILES} small files / theirs `mkdir` and `put_archive` for each", a_file_each, one_archive)


async def main(image: str) -> None:
    client = docker.from_env(max_pool_size=AT_ONCE)
    factory, spec = DockerContainerFactory(), ContainerSpec("bench", docker_image=image)
    await life(client, factory, spec)
    await uploads(client, factory, spec)
    await at_once(client, factory, spec)
    client.close()


if __name__ == "__main__":
    print(HEADER)
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
