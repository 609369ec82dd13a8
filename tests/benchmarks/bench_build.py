"""What an image costs that is built already: ours (hash of the context, one inspect) against docker-py's `build`.

Run by hand, with an engine: `python -m tests.benchmarks.bench_build [IMAGE]`. docker-py sends the whole context and
walks through the builder's cache, as a plain implementation does at each start. The two take turns.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

import docker
from docker.errors import ImageNotFound

from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.image import ensure_image
from tests.benchmarks.comparison import HEADER, latency

ROUNDS = 15
CONTEXTS = {"3 files, 30 kB": (3, 10_000), "300 files, 30 MB": (300, 100_000)}


async def compare(client: docker.DockerClient, image: str, what: str, files: int, size: int) -> None:
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
                started = time.perf_counter()
                tag = await ensure_image(engine, name=name, docker_image=None, context_dir=context)
                ours.append((time.perf_counter() - started) * 1000)
                started = time.perf_counter()
                await asyncio.to_thread(client.images.build, path=folder, tag=f"{name}:peer", rm=True)
                theirs.append((time.perf_counter() - started) * 1000)
            latency(f"an image built before, context of {what} / theirs `images.build`", theirs[1:], ours[1:])
        finally:
            for made in filter(None, (f"{name}:peer", tag)):
                with contextlib.suppress(ImageNotFound):  # the benchmark was broken off
                    client.images.remove(made, force=True)


async def main(image: str) -> None:
    client = docker.from_env()
    for what, (files, size) in CONTEXTS.items():
        await compare(client, image, what, files, size)
    client.close()


if __name__ == "__main__":
    print(HEADER)
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian:bookworm-slim"))
