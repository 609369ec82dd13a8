"""What snapshots cost: taking them, a run that takes one at every step, restoring one.

Run by hand: `python -m tests.benchmarks.bench_snapshots [IMAGE]`; with an engine, and as root for its fast way. It
takes some minutes. What is compared takes turns, so that a noisy machine is noisy for all.
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import docker

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerFactory, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.rollout import run_episode
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule
from tests.benchmarks.bench_step import InMemoryTask
from tests.benchmarks.comparison import timed

Place = tuple[str, ContainerFactory, str | None]
"""What rows are called, and where their episodes are run: the containers and their image."""

ROUNDS, EDITS = 7, 20
FILES, EDITED = 20, 3
RUN_STEPS, THINK_SEC, RUNS = 50, 0.2, 2

# Together: 20 files of 4 kB, one of 10 MB, a deletion, two appends.
PROJECT = f"""mkdir -p /work/source && cd /work/source
for n in $(seq 0 {FILES - 1}); do head -c 3072 /dev/urandom | base64 >module$n.py; done
rm -f /etc/issue; echo >>/etc/profile; echo >>/etc/bash.bashrc"""
BOTH = f"{PROJECT}\nhead -c 10000000 /dev/urandom >/work/data.bin"


class EditingTask(InMemoryTask):
    def __init__(self, image: str | None) -> None:
        self.container_spec = ContainerSpec("bench-snapshots", docker_image=image)

    def describe(self) -> Mapping[str, Any]:
        return {"format": "benchmark", "name": self.name}


def environment(containers: ContainerFactory, image: str | None) -> CodeEnvironment:
    return CodeEnvironment([EditingTask(image)], container_factory=containers, code_agent_factory=ShellAgentFactory())  # type: ignore[list-item]


def reply(command: str) -> LLMResponse:
    return LLMResponse.from_text(f"I go on with the next thing.\n\n```bash\n{command}\n```\n")


def edit(number: int) -> LLMResponse:
    names = " ".join(f"module{(number + step * 5) % FILES}.py" for step in range(EDITED))
    return reply(f"cd /work/source && for name in {names}; do echo 'number = {number}' >>$name; done")


SUBMIT = reply("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def row(what: str, measured: str, beside: str = "", ratio: str = "") -> None:
    print(f"| {what} | {measured} | {beside} | {ratio} |", flush=True)


def ms(values: Sequence[float]) -> str:
    """Median, least and 95th percentile of milliseconds."""
    p95 = sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]
    median, least, most = (
        f"{one:.0f}" if one >= 100 else f"{one:.3g}" for one in (statistics.median(values), min(values), p95)
    )
    return f"{median} ms (least {least}, p95 {most}, n={len(values)})"


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def first_snapshot(place: Place, client: docker.DockerClient) -> None:
    name, containers, image = place
    ours: list[float] = []
    theirs: list[float] = []
    our_bytes = their_bytes = 0
    for turn in range(ROUNDS + 1):
        async with environment(containers, image) as env:
            await env.reset()
            await env.step(reply(BOTH))
            with tempfile.TemporaryDirectory() as store:
                took, _ = await timed(partial(env.export_state, store))
                our_bytes = bytes_in(Path(store))
            ours += [took] if turn else []  # the first warms up
            if image is not None:
                container: Any = env.container
                get = partial(asyncio.to_thread, download, client, container.container_name)
                took, their_bytes = await timed(get)
                theirs += [took] if turn else []
    what = f"{name}: first snapshot, {FILES} files and one of 10 MB"
    measured = f"{ms(ours)}, {our_bytes / 1e6:.3g} MB"
    if not theirs:
        row(what, measured)
        return
    times = statistics.median(theirs) / statistics.median(ours)
    row(what, measured, f"`get_archive('/')`: {ms(theirs)}, {their_bytes / 1e6:.3g} MB", f"{times:.1f}x")


def download(client: docker.DockerClient, container: str) -> int:
    with tempfile.TemporaryFile() as file:
        for piece in client.api.get_archive(container, "/")[0]:
            file.write(piece)
        return file.tell()


async def later_snapshots(place: Place) -> None:
    name, containers, image = place
    took: list[float] = []
    added: list[float] = []
    async with environment(containers, image) as env:
        with tempfile.TemporaryDirectory() as store:
            await env.reset()
            await env.step(reply(BOTH))
            await env.export_state(store)
            for number in range(EDITS):
                await env.step(edit(number))
                before = bytes_in(Path(store))
                one, _ = await timed(partial(env.export_state, store))
                took.append(one)
                added.append(bytes_in(Path(store)) - before)
    row(f"{name}: a snapshot after {EDITED} small edits", f"{ms(took)}, {statistics.median(added) / 1e3:.0f} kB")


async def restore(place: Place) -> None:
    """An environment that goes on from a snapshot, beside a new container of the same kind."""
    name, containers, image = place
    ours: list[float] = []
    plain: list[float] = []
    task = EditingTask(image)
    with tempfile.TemporaryDirectory() as store:
        async with environment(containers, image) as env:
            await env.reset()
            await env.step(reply(BOTH))
            snapshot = await env.export_state(store)
        for turn in range(ROUNDS + 1):
            box = containers(task.container_spec)
            started, _ = await timed(box.start)
            await box.stop()
            load = partial(
                CodeEnvironment.load_from_state,
                snapshot.snapshot_dir,
                container_factory=containers,
                code_agent_factory=ShellAgentFactory(),
                task=task,  # type: ignore[arg-type]
            )
            took, env = await timed(load)
            await env.close()
            if turn:  # the first warms up
                plain.append(started)
                ours.append(took)
    more = statistics.median(ours) - statistics.median(plain)
    row(f"{name}: restore", ms(ours), f"a new container: {ms(plain)}", f"{more:+.0f} ms")


class ThinkingPolicy:
    """Thinks, then edits; submits at the end."""

    def __init__(self) -> None:
        self._number = -1

    async def __call__(self, request: object) -> LLMResponse:
        await asyncio.sleep(THINK_SEC)
        self._number += 1
        if self._number in (0, RUN_STEPS - 1):
            return SUBMIT if self._number else reply(PROJECT)
        return edit(self._number)


async def run_with_snapshots(place: Place) -> None:
    """A whole episode without snapshots and with one at every step."""
    name, containers, image = place
    walls: dict[bool, list[float]] = {False: [], True: []}
    waited: list[float] = []
    size = count = 0
    for _ in range(RUNS):
        for snapshots in (False, True):
            with tempfile.TemporaryDirectory() as store:
                schedule = SnapshotSchedule(Path(store), every=1) if snapshots else NoSnapshots()
                env: Any = schedule.around(environment(containers, image), episode_id="e")
                wall, _ = await timed(partial(run_episode, env, ThinkingPolicy(), EpisodeEvents()))
                walls[snapshots].append(wall)
                if snapshots:
                    assert env.snapshot_failures == 0
                    waited.append(env.report().phase_sec["snapshot"] * 1000)
                    count, size = len(env.snapshots), bytes_in(Path(store))
    row(
        f"{name}: {RUN_STEPS} steps, the policy thinks {THINK_SEC} s each, snapshot=every_step",
        f"{ms(walls[True])}, of it waited {statistics.median(waited):.3g} ms; {size / count / 1e3:.0f} kB a snapshot",
        f"snapshot=none: {ms(walls[False])}",
        f"{statistics.median(walls[True]) / statistics.median(walls[False]):.2f}x",
    )


async def main(image: str, client: docker.DockerClient) -> None:
    print("| what | measured | beside it | ratio |\n|---|---|---|---|")
    on_docker: Place = ("docker", DockerContainerFactory(), image)
    local: Place = ("local", LocalContainerFactory(), None)
    for place in (on_docker, local):
        await first_snapshot(place, client)
    for measure in (later_snapshots, restore, run_with_snapshots):
        for place in (on_docker, local):
            await measure(place)


if __name__ == "__main__":
    engine = docker.from_env()
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "python:3.12-slim", engine))
    engine.close()
