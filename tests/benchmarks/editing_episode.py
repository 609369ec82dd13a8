"""What `bench_snapshots` takes snapshots of: an episode that edits files, on any container, and a larger image."""

from __future__ import annotations

import os
import shutil
import statistics
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.llms.response import LLMResponse
from tests.benchmarks.bench_step import InMemoryTask

Place = tuple[str, ContainerFactory, str | None]
"""What rows are called, and where their episodes are run: the containers and their image."""

FILES = 20
EDITED = 3

# Together: 20 files of 4 kB, one of 10 MB, a deletion, two appends.
PROJECT = f"""mkdir -p /work/source && cd /work/source
for n in $(seq 0 {FILES - 1}); do head -c 3072 /dev/urandom | base64 >module$n.py; done
rm -f /etc/issue; echo >>/etc/profile; echo >>/etc/bash.bashrc"""
DATA = "head -c 10000000 /dev/urandom >/work/data.bin"
BOTH = f"{PROJECT}\n{DATA}"

_LARGER_BYTES = 1_200_000_000
_NEEDED_BYTES = 6 * _LARGER_BYTES
_DIRECTORIES, _FILE_BYTES = 40, 28_000
_LABEL = "ares_exp.benchmark"
_LARGER = f"""for n in $(seq {_DIRECTORIES}); do
  mkdir -p /data/$n && cd /data/$n || exit
  head -c {_LARGER_BYTES // _DIRECTORIES} /dev/urandom | split -b {_FILE_BYTES} -a 4 || exit
done"""
_LARGER_SEC = 600


class EditingTask(InMemoryTask):
    def __init__(self, image: str | None) -> None:
        self.container_spec = ContainerSpec("bench-snapshots", docker_image=image)

    def describe(self) -> Mapping[str, Any]:
        return {"format": "benchmark", "name": self.name}


def environment(containers: ContainerFactory, image: str | None) -> CodeEnvironment:
    """One that has not been reset."""
    return CodeEnvironment([EditingTask(image)], container_factory=containers, code_agent_factory=ShellAgentFactory())  # type: ignore[list-item]


def reply(command: str) -> LLMResponse:
    return LLMResponse.from_text(f"I go on with the next thing.\n\n```bash\n{command}\n```\n")


def edit(number: int) -> LLMResponse:
    """A small edit of three files."""
    names = " ".join(f"module{(number + step * 5) % FILES}.py" for step in range(EDITED))
    return reply(f"cd /work/source && for name in {names}; do echo 'number = {number}' >>$name; done")


SUBMIT = reply("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def container_of(env: CodeEnvironment) -> Any:
    """The running container."""
    return env.container


def row(what: str, measured: str, beside: str = "", ratio: str = "", asked: str = "") -> None:
    """Prints a line of the table."""
    print(f"| {what} | {measured} | {beside} | {ratio} | {asked} |", flush=True)


def ms(values: Sequence[float]) -> str:
    """Median, least and 95th percentile of milliseconds."""
    p95 = sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]
    median, least, most = (
        f"{one:.0f}" if one >= 100 else f"{one:.3g}" for one in (statistics.median(values), min(values), p95)
    )
    return f"{median} ms (least {least}, p95 {most}, n={len(values)})"


def mb(size: float) -> str:
    """Bytes as megabytes."""
    return f"{size / 1e6:.3g} MB"


def bytes_in(directory: Path) -> int:
    """The sizes of all files below."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextmanager
def larger_image(client: docker.DockerClient, image: str) -> Iterator[str | None]:
    """`image` with 1.2 GB more in some 43 000 files; `None`, with a message, where the disk has no room for that."""
    root = Path(client.info()["DockerRootDir"])
    free = shutil.disk_usage(root if os.access(root, os.R_OK) else "/").free
    if free < _NEEDED_BYTES:
        print(f"No larger image: that takes {_NEEDED_BYTES / 1e9:.0f} GB of disk, {free / 1e9:.1f} GB are free.\n")
        yield None
        return
    mark = uuid.uuid4().hex
    mine = {"label": f"{_LABEL}={mark}"}
    try:
        box = client.containers.create(image, ["sh", "-c", _LARGER], labels={_LABEL: mark}, network_mode="none")
        box.start()
        if (ended := box.wait(timeout=_LARGER_SEC))["StatusCode"]:
            raise RuntimeError(f"The larger image was not made: {ended}, {box.logs()[-500:]!r}")
        with ThreadPoolExecutor(1) as pool:  # waits for the engine, also when interrupted: it would go on by itself
            made = pool.submit(client.api.commit, box.id).result()["Id"]  # has the label, too
        box.remove()
        yield made
    finally:
        for left in client.api.containers(all=True, filters=mine):
            client.api.remove_container(left["Id"], force=True)
        for left in client.api.images(filters=mine):
            client.api.remove_image(left["Id"], force=True)
