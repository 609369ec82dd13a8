"""What it costs to go on from a snapshot: restoring, forking, replaying. Rows of `bench_snapshots`."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import docker

from ares_exp.agents.runtime.encoding import JournalEncoder, decode_journal
from ares_exp.agents.runtime.journal import Journal
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import Container, ExecResult
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.environments.agent_host import AgentHost
from ares_exp.environments.code_environment import CodeEnvironment
from tests.benchmarks.bench_step import InMemoryContainer, InMemoryFactory
from tests.benchmarks.comparison import timed
from tests.benchmarks.editing_episode import (
    BOTH,
    EditingTask,
    Place,
    bytes_in,
    container_of,
    edit,
    environment,
    mb,
    ms,
    reply,
    row,
)

ROUNDS, FORKS, FORK_ROUNDS = 7, 8, 5
STEPS, OUTPUT_CHARS, REPLAYS = 250, 4000, 9


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
    row(f"{name}: restore", ms(ours), f"a new container: {ms(plain)}", f"{more:+.0f} ms", "< +1000 ms")


async def fork(place: Place) -> None:
    """Branches that have each run a command, beside as many new containers."""
    name, containers, image = place
    ours: list[float] = []
    plain: list[float] = []
    disk = 0
    for turn in range(FORK_ROUNDS + 1):
        boxes = [containers(EditingTask(image).container_spec) for _ in range(FORKS)]
        branches: list[CodeEnvironment] = []
        try:
            started, _ = await timed(partial(start_and_run, boxes))
        finally:
            await asyncio.gather(*(box.stop() for box in boxes))
        async with environment(containers, image) as env:
            await env.reset()
            await env.step(reply(BOTH))
            try:
                took, _ = await timed(partial(fork_and_step, env, branches))
                disk = await asyncio.to_thread(disk_of, branches, image)
            finally:
                await asyncio.gather(*(branch.close() for branch in branches))
        if turn:  # the first warms up
            ours.append(took)
            plain.append(started)
    beside = f"{FORKS} new containers, a command each: {ms(plain)}"
    what = f"{name}: fork({FORKS}), until each has run a command"
    row(what, f"{ms(ours)}, {mb(disk)} in all", beside, "", "< 3000 ms")


async def start_and_run(boxes: Sequence[Container]) -> None:
    async def one(box: Container) -> None:
        await box.start()
        await box.exec("true")

    await asyncio.gather(*map(one, boxes))


async def fork_and_step(env: CodeEnvironment, branches: list[CodeEnvironment]) -> None:
    branches += await env.fork(FORKS)
    await asyncio.gather(*(branch.step(edit(number)) for number, branch in enumerate(branches)))


def disk_of(branches: Sequence[CodeEnvironment], image: str | None) -> int:
    """Bytes that branches take: of memory where the boxes' files are there, of the engine's disk otherwise."""
    boxes = [container_of(branch) for branch in branches]
    if image is None:
        return sum(bytes_in(box._directory.path) for box in boxes)
    api = docker.from_env().api
    try:
        own = sum(
            box["SizeRw"]
            for box in api.containers(size=True)
            if box["Names"][0][1:] in {box.container_name for box in boxes}
        )
        derived = {api.inspect_container(box.container_name)["Image"] for box in boxes}
        shared = sum(api.inspect_image(one)["Size"] - api.inspect_image(image)["Size"] for one in derived)
        return int(own + shared)
    finally:
        api.close()


class ReadingContainer(InMemoryContainer):
    """Each command shows another piece of the standard library."""

    def __init__(self) -> None:
        files = sorted(Path(tempfile.__file__).parent.glob("*.py"))
        self._text = "".join(path.read_text(errors="replace") for path in files)
        self._at = 0

    async def exec(self, command: str, **_: object) -> ExecResult:
        self._at += OUTPUT_CHARS
        return ExecResult(self._text[self._at - OUTPUT_CHARS : self._at], 0, 0.0)


class ReadingFactory(InMemoryFactory):
    def __call__(self, spec: object) -> Any:
        return ReadingContainer()


async def replay() -> None:
    """The journal of a long episode: written, read, and the agent run against it."""
    async with environment(ReadingFactory(), None) as env:  # type: ignore[arg-type]
        await env.reset()
        for number in range(STEPS):
            await env.step(reply(f"sed -n {number}p source.py"))
        assert env.host is not None
        journal = env.host.runtime.journal
        assert journal is not None
        took: dict[str, list[float]] = {"encode": [], "store": [], "read": [], "replay": []}
        lines: list[bytes] = []
        for _ in range(REPLAYS):
            with tempfile.TemporaryDirectory() as directory:
                objects = ObjectStore(Path(directory))
                lines = measured(took["encode"], lambda: JournalEncoder().update(journal))
                digests = measured(took["store"], lambda lines=lines, to=objects: to.put_lines(lines))  # type: ignore[misc]
                stored = bytes_in(Path(directory))
                read = measured(took["read"], partial(read_journal, objects, digests, journal))
            host = AgentHost(ReadingContainer(), read)
            try:
                go = partial(host.restore, ShellAgentFactory(), "Do it.", timeout_sec=None, elapsed_sec=1e6)
                measured(took["replay"], go)
            finally:
                await host.cancel()
    whole = [read + run for read, run in zip(took["read"], took["replay"], strict=True)]
    what = f"journal of {STEPS} steps with {OUTPUT_CHARS} B outputs"
    row(f"{what}: read and replay", ms(whole), f"of it replay: {ms(took['replay'])}", "", "< 200 ms")
    size = f"{mb(sum(map(len, lines)))}, {mb(stored)} stored"
    row(f"{what}: encode and store all of it", f"{ms(took['encode'])} + {ms(took['store'])}, {size}")


def read_journal(objects: ObjectStore, digests: Sequence[str], journal: Journal) -> Journal:
    lines = objects.get_lines(digests)
    return decode_journal(lines, started_at=journal.started_at, seed=journal.seed, where="benchmark")


def measured(into: list[float], what: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = what()
    into.append((time.perf_counter() - started) * 1000)
    return result
