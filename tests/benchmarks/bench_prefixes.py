"""What attempts save that start from one set-up: `python -m tests.benchmarks.bench_prefixes [local] [docker]`.

Each row sets containers up anew and from a shared set-up in turn, so that both meet the same load of the machine.
Processor time is that of this process and its children, and of a Docker engine on this machine; what containers use
themselves is not in it.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerFactoryBase
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.shared_setups import SharedSetups
from ares_exp.tasks.harbor import HarborTask, load_task

ROUNDS, AT_ONCE = 5, 4
BACKENDS: dict[str, type[ContainerFactoryBase]] = {"local": LocalContainerFactory, "docker": DockerContainerFactory}
SETUPS = {
    "ten small files": "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i > /work/$i; done",
    "1,000 files, 50 MB": (
        "python3 -c \"import os; [open(f'/work/{n}', 'wb').write(os.urandom(50_000)) for n in range(1000)]\""
    ),
    "modules of Python, copied and compiled": (
        "from=$(python3 -c 'import os; print(os.path.dirname(os.__file__))')\n"
        "cp -r $from/*.py $from/asyncio $from/email $from/http $from/json /work\n"
        "python3 -m compileall -q -f /work"
    ),
    "ten small files, after 5 s of waiting": "sleep 5; for i in 1 2 3 4 5 6 7 8 9 10; do echo $i > /work/$i; done",
}
HEADER = (
    "| container, set-up: seconds (of a processor) | each its own | the first | later ones | times as fast | "
    f"{AT_ONCE} at once, own | {AT_ONCE} at once, shared |\n|---|---|---|---|---|---|---|"
)
ENGINE = ("dockerd", "containerd")


def make_task(folder: Path, script: str) -> HarborTask:
    """A task whose first step has that set-up."""
    files = {
        "environment/Dockerfile": "FROM python:3.12-slim\nRUN mkdir /work\nWORKDIR /work\n",
        "task.toml": "[[steps]]\nname = 'one'\n",
        "steps/one/instruction.md": "Do nothing.\n",
        "steps/one/workdir/setup.sh": f"set -e\n{script}\n",
        "steps/one/tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_task(folder)


def processor_sec() -> float:
    """Processor time so far."""
    spent = [time.process_time(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])]
    for process in psutil.process_iter(["name", "cpu_times"]):
        if process.info["name"] in ENGINE:
            spent += process.info["cpu_times"][:4]
    return sum(spent)


Cost = tuple[float, float]
"""Seconds, and seconds of a processor."""


async def ready_sec(factory: ContainerFactoryBase, task: HarborTask, setups: SharedSetups | None, n: int = 1) -> Cost:
    """What it takes until n attempts have asked their first question, and until they are closed."""
    made = [
        CodeEnvironment([task], container_factory=factory, code_agent_factory=ShellAgentFactory(), shared_setups=setups)
        for _ in range(n)
    ]
    try:
        began, spent = time.perf_counter(), processor_sec()
        await asyncio.gather(*(env.reset() for env in made))
        seconds = time.perf_counter() - began
    finally:
        await asyncio.gather(*(env.close() for env in made))
    return seconds, processor_sec() - spent


async def row(backend: str, name: str) -> None:
    """Prints one row."""
    factory = BACKENDS[backend]()
    own: list[Cost] = []
    shared: list[Cost] = []
    with tempfile.TemporaryDirectory() as folder:
        ready = partial(ready_sec, factory, make_task(Path(folder, "task"), SETUPS[name]))
        await ready(None)  # builds the image
        setups = SharedSetups()
        try:
            first = await ready(setups)
            for _ in range(ROUNDS):
                own.append(await ready(None))
                shared.append(await ready(setups))
            many = [await ready(one, AT_ONCE) for one in (None, setups)]
        finally:
            await setups.close()
            await factory.close()
    a, b = (tuple(map(statistics.median, zip(*costs, strict=True))) for costs in (own, shared))
    cells = [f"{backend}, {name}", told(a), told(first), told(b), f"{a[0] / b[0]:.1f}", *map(told, many)]
    print("|", " | ".join(cells), "|", flush=True)


def told(cost: Sequence[float]) -> str:
    """Writes both numbers."""
    return f"{cost[0]:.2f} ({cost[1]:.2f})"


async def main(backends: list[str]) -> None:
    """Prints the table."""
    print(HEADER, flush=True)
    for backend in backends or list(BACKENDS):
        for name in SETUPS:
            await row(backend, name)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
