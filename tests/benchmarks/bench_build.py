"""What an image costs that is built already: ours (hash of the context, one inspect) against docker-py's `build`.

Run by hand, with an engine: `python tests/benchmarks/bench_build.py [IMAGE]`. docker-py sends the whole context and
walks through the builder's cache, as a plain implementation does at each start. The two take turns. Medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import docker

from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.image import ensure_image

ROUNDS = 15
CONTEXTS = {"3 files, 30 kB": (3, 10_000), "300 files, 30 MB": (300, 100_000)}


def show(name: str, values: list[float], against: list[float] | None = None) -> None:
    median, p90 = statistics.median(values), sorted(values)[int(len(values) * 0.9)]
    ratio = f"{statistics.median(against) / median:8.1f}x" if against else ""
    print(f"  {name:36} {median:9.2f} ms (p90 {p90:.2f}, n={len(values)}) {ratio}")


async def compare(client: docker.DockerClient, image: str, files: int, size: int) -> None:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        context, engine = Path(folder), await connect()
        for number in range(files):
            (context / f"file{number}").write_bytes(os.urandom(size))
        lines = [f"FROM {image}", "COPY . /c", *(f"RUN echo {number} > /{number}" for number in range(3))]
        (context / "Dockerfile").write_text("\n".join(lines))
        ours: list[float] = []
        theirs: list[float] = []
        tag = ""
        try:
            for _ in range(ROUNDS + 1):
                began = time.perf_counter()
                tag = await ensure_image(engine, name=name, docker_image=None, context_dir=context)
                ours.append((time.perf_counter() - began) * 1000)
                began = time.perf_counter()
                await asyncio.to_thread(client.images.build, path=folder, tag=f"{name}:peer", rm=True)
                theirs.append((time.perf_counter() - began) * 1000)
            show("docker-py images.build, warm cache", theirs[1:])
            show("ours", ours[1:], theirs[1:])
            show("ours, the first time (a real build)", ours[:1])
        finally:
            for made in (f"{name}:peer", tag):
                client.images.remove(made, force=True)


async def main(image: str) -> None:
    client = docker.from_env()
    for what, (files, size) in CONTEXTS.items():
        print(f"context of {what}, Dockerfile of 5 instructions")
        await compare(client, image, files, size)
    client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
