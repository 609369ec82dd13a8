"""What the life of a Docker container costs: ours beside docker-py used the plain way.

Run by hand, with an engine: `python tests/benchmarks/bench_lifecycle.py [IMAGE]`. The ways take turns, so that a noisy
machine is noisy for all of them. Prints medians, the 90th percentile and the ratio to docker-py's.
"""

from __future__ import annotations

import asyncio
import io
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

LIVES, GRACEFUL_STOPS, WARM, AT_ONCE, FILES, UPLOADS = 10, 2, 10, 32, 50, 3
FOR_EVER, LOGIN = ["tail", "-f", "/dev/null"], ["bash", "-lc", "true"]

Peer = Any  # docker-py's container
Seen = dict[str, list[float]]


async def timed(what: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Milliseconds and result."""
    start = time.perf_counter()
    result = await what()
    return (time.perf_counter() - start) * 1000, result


def table(title: str, seen: Seen, against: str) -> None:
    print(f"\n{title}")
    for name, values in seen.items():
        median, p90 = statistics.median(values), sorted(values)[int(len(values) * 0.9)]
        ratio = "" if name == against else f"{statistics.median(seen[against]) / median:8.1f}x"
        print(f"  {name:58} {median:9.2f} ms (p90 {p90:.2f}, n={len(values)}) {ratio}")


async def start_peer(client: docker.DockerClient, image: str) -> Peer:
    def start() -> Peer:
        peer = client.containers.run(image, FOR_EVER, detach=True)
        peer.exec_run(LOGIN)
        return peer

    return await asyncio.to_thread(start)


async def start_ours(factory: DockerContainerFactory, spec: ContainerSpec) -> Container:
    box = factory(spec)
    await box.start()
    await box.exec("true")
    return box


async def life(client: docker.DockerClient, factory: DockerContainerFactory, spec: ContainerSpec) -> None:
    """One container at a time."""
    theirs, ours = "docker-py: run, exec_run bash -lc true", "ours: create, start, bash -lc true"
    starts: Seen = {theirs: [], ours: []}
    graceful, forced, stop = "docker-py: stop() and remove()", "docker-py: remove(force=True)", "ours: stop"
    stops: Seen = {graceful: [], forced: [], stop: []}
    for turn in range(LIVES + 1):
        took_theirs, peer = await timed(lambda: start_peer(client, spec.docker_image or ""))
        way = graceful if 0 < turn <= GRACEFUL_STOPS else forced

        async def end_peer(peer: Peer = peer, gracefully: bool = way == graceful) -> None:
            if gracefully:
                await asyncio.to_thread(peer.stop)
            await asyncio.to_thread(peer.remove, force=True)

        stopped_theirs, _ = await timed(end_peer)
        took_ours, box = await timed(lambda: start_ours(factory, spec))
        stopped_ours, _ = await timed(box.stop)
        if turn:  # the first warms up
            starts[theirs].append(took_theirs)
            starts[ours].append(took_ours)
            stops[way].append(stopped_theirs)
            stops[stop].append(stopped_ours)
    table("start to the first command", starts, theirs)
    table("stop", stops, graceful)


async def at_once(client: docker.DockerClient, factory: DockerContainerFactory, spec: ContainerSpec) -> None:
    """Many containers, asked for in the same moment."""
    theirs, ours = f"docker-py, a thread each: {AT_ONCE} started", f"ours: {AT_ONCE} started"
    each, total = {theirs: list[float](), ours: list[float]()}, {theirs: list[float](), ours: list[float]()}
    ends: Seen = {"docker-py: remove(force=True), a thread each": [], "ours: stop": []}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        for _ in range(2):
            for name, begin in (
                (theirs, lambda: start_peer(client, spec.docker_image or "")),
                (ours, lambda: start_ours(factory, spec)),
            ):

                async def all_of_them(begin: Callable[[], Awaitable[Any]] = begin) -> list[tuple[float, Any]]:
                    return await asyncio.gather(*(timed(begin) for _ in range(AT_ONCE)))

                took, boxes = await timed(all_of_them)
                total[name].append(took)
                each[name] += [one for one, _ in boxes]

                async def end_all(boxes: list[tuple[float, Any]] = boxes) -> None:
                    for_peers = (asyncio.to_thread(box.remove, force=True) for _, box in boxes)
                    await asyncio.gather(
                        *(for_peers if hasattr(boxes[0][1], "attrs") else (b.stop() for _, b in boxes))
                    )

                ended, _ = await timed(end_all)
                ends["ours: stop" if name == ours else "docker-py: remove(force=True), a thread each"].append(ended)
    table(f"{AT_ONCE} at once: until the last has run a command", total, theirs)
    table(f"{AT_ONCE} at once: one container's wait for its first command", each, theirs)
    table(f"{AT_ONCE} at once: until the last is gone", ends, "docker-py: remove(force=True), a thread each")


async def warm(client: docker.DockerClient, spec: ContainerSpec) -> None:
    """Containers that were started ahead."""
    factory = DockerContainerFactory(warm=2)
    theirs, whole, bare = (
        "docker-py: run, exec_run bash -lc true",
        "ours, warm: start, bash -lc true",
        "ours, warm: start",
    )
    seen: Seen = {theirs: [], whole: [], bare: []}
    first = await start_ours(factory, spec)
    for _ in range(WARM):
        took, peer = await timed(lambda: start_peer(client, spec.docker_image or ""))
        await asyncio.to_thread(peer.remove, force=True)
        seen[theirs].append(took)
        assert factory._pool is not None
        while not factory._pool.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        box = factory(spec)
        started, _ = await timed(box.start)
        command, _ = await timed(lambda box=box: box.exec("true"))  # type: ignore[misc]
        seen[bare].append(started)
        seen[whole].append(started + command)
        await box.stop()
    await first.stop()
    await factory.close()
    table("warm start (container.warm=2, one waiting)", seen, theirs)


async def uploads(client: docker.DockerClient, factory: DockerContainerFactory, spec: ContainerSpec) -> None:
    """A directory of small files."""
    a_file_each, one_archive = (
        f"docker-py: mkdir and put_archive for each of {FILES} files",
        "ours: upload, one archive",
    )
    seen: Seen = {a_file_each: [], one_archive: []}
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
                seen[a_file_each].append(took)
                for m in range(5):
                    took, _ = await timed(lambda n=n, m=m: box.upload(directory, f"/b{n}{m}"))  # type: ignore[misc]
                    seen[one_archive].append(took)
    table(f"upload of {FILES} small files", seen, a_file_each)


async def main(image: str) -> None:
    """All tables."""
    client = docker.from_env(max_pool_size=AT_ONCE)
    factory, spec = DockerContainerFactory(), ContainerSpec("bench", docker_image=image)
    await life(client, factory, spec)
    await warm(client, spec)
    await uploads(client, factory, spec)
    await at_once(client, factory, spec)
    client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
