"""What snapshots cost: taking them, a run that takes one at every step, restoring, forking, replaying.

Run by hand: `python -m tests.benchmarks.bench_snapshots [IMAGE]`; with an engine, and as root for its fast way. It
takes some minutes, and 3 GB of disk for an image that it makes and removes. What is compared takes turns, so that a
noisy machine is noisy for all.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import docker

from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.exporting import export_episode
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.rollout import run_episode
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule
from tests.benchmarks.bench_restores import fork, replay, restore
from tests.benchmarks.comparison import timed
from tests.benchmarks.editing_episode import (
    BOTH,
    PROJECT,
    SUBMIT,
    Place,
    bytes_in,
    container_of,
    edit,
    environment,
    larger_image,
    mb,
    ms,
    reply,
    row,
)

ROUNDS, EDITS = 7, 20
RUN_STEPS, THINK_SEC, RUNS = 50, 0.2, 2
HEADER = "| what | measured | beside it | ratio | asked |\n|---|---|---|---|---|"


class FirstSnapshots:
    """First snapshots of episodes in one place, beside downloads of all their files."""

    def __init__(self, place: Place, client: docker.DockerClient | None) -> None:
        """`client`: `None` where there is nothing to download."""
        self._place, self._client = place, client
        self._ours: dict[bool, list[float]] = {True: [], False: []}
        self._theirs: list[float] = []
        self._our_bytes = self._their_bytes = 0

    async def turn(self, number: int, others: Path) -> None:
        """One episode. `others` is a store that has the episodes of other turns."""
        async with environment(*self._place[1:]) as env:
            await env.reset()
            await env.step(reply(BOTH))
            for is_new in (True, False) if number % 2 else (False, True):
                with tempfile.TemporaryDirectory() as new:
                    took, _ = await timed(partial(env.export_state, new if is_new else others))
                    self._our_bytes = bytes_in(Path(new)) if is_new else self._our_bytes
                self._ours[is_new] += [took] if number else []  # the first warms up
            if self._client is not None:
                get = partial(asyncio.to_thread, download, self._client, container_of(env).container_name)
                took, self._their_bytes = await timed(get)
                self._theirs += [took] if number else []

    @property
    def median(self) -> float:
        """Milliseconds, in a new store."""
        return statistics.median(self._ours[True])

    def show(self) -> None:
        """Prints its rows."""
        for is_new, took in self._ours.items():
            store = "a new store" if is_new else "a store with other episodes"
            what = f"{self._place[0]}: first snapshot, 20 files and one of 10 MB, in {store}"
            measured = f"{ms(took)}, {mb(self._our_bytes)}"
            if not self._theirs:
                row(what, measured)
                continue
            times = statistics.median(self._theirs) / statistics.median(took)
            beside = f"`get_archive('/')`: {ms(self._theirs)}, {mb(self._their_bytes)}"
            row(what, measured, beside, f"{times:.1f}x, {self._their_bytes / self._our_bytes:.0f}x", ">= 20x, >= 20x")


async def first_snapshots(places: Sequence[Place], client: docker.DockerClient) -> list[FirstSnapshots]:
    """Rows of all places, which take turns."""
    found = [FirstSnapshots(place, client if place[2] else None) for place in places]
    with tempfile.TemporaryDirectory() as others:
        for number in range(ROUNDS + 1):
            for one in found:
                await one.turn(number, Path(others))
    for one in found:
        one.show()
    return found


def download(client: docker.DockerClient, container: str) -> int:
    """The container's whole file system into a file. Returns its bytes."""
    with tempfile.TemporaryFile() as file:
        for piece in client.api.get_archive(container, "/")[0]:
            file.write(piece)
        return file.tell()


async def later_snapshots(place: Place) -> None:
    """One snapshot after each small edit; and the same with each on the disk for certain."""
    name, containers, image = place
    took: dict[bool, list[float]] = {False: [], True: []}
    added: list[float] = []
    async with environment(containers, image) as plain, environment(containers, image) as synced:
        with tempfile.TemporaryDirectory() as directory:
            for number in range(-1, EDITS):
                for sync, env in ((False, plain), (True, synced)):
                    store = Path(directory) / str(sync)
                    if number < 0:
                        await env.reset()
                        await env.step(reply(BOTH))
                        await export(env, store, sync)
                        continue
                    await env.step(edit(number))
                    before = bytes_in(store)
                    one, _ = await timed(partial(export, env, store, sync))
                    took[sync].append(one)
                    added.append(bytes_in(store) - before)
    per_snapshot = f"{statistics.median(added) / 1e3:.0f} kB (most {max(added) / 1e3:.0f})"
    row(f"{name}: a snapshot after 3 small edits", f"{ms(took[False])}, {per_snapshot}", "", "", "< 100 ms, < 200 kB")
    row(f"{name}: the same with `sync`", ms(took[True]))


async def export(env: CodeEnvironment, store: Path, sync: bool) -> None:
    with env._waiting_for_an_action("export_state()") as time_step:
        await export_episode(env, time_step, store, None, sync=sync)


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


async def main(image: str, large: str | None, client: docker.DockerClient) -> None:
    """All rows."""
    print(HEADER)
    on_docker: Place = ("docker", DockerContainerFactory(), image)
    archives: Place = ("docker, capture=archive", DockerContainerFactory(capture="archive"), image)
    local: Place = ("local", LocalContainerFactory(), None)
    on_large: Place = ("docker, 1.2 GB more in the image", on_docker[1], large)
    small, *rest = await first_snapshots([on_docker, *([on_large] if large else []), archives, local], client)
    if large is not None:
        ratio = f"{rest[0].median / small.median:.2f}x"
        row("docker: first snapshot, the larger image / the other", "", "", ratio, "no slower")
        await restore(on_large)
    for place in (on_docker, archives, local):
        await later_snapshots(place)
    for measure in (restore, fork, run_with_snapshots):
        for place in (on_docker, local):
            await measure(place)
    await replay()


if __name__ == "__main__":
    normal = sys.argv[1] if len(sys.argv) > 1 else "python:3.12-slim"
    engine = docker.from_env(timeout=600)  # an image of that size takes its time
    with larger_image(engine, normal) as larger:
        asyncio.run(main(normal, larger, engine))
    engine.close()
