"""What attempts save that start from one set-up: `python -m tests.benchmarks.bench_prefixes [local] [docker]`.

Each row sets containers up anew and from a shared set-up in turn, so that both meet the same load of the machine.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

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
    "modules of Python, copied and compiled": (
        "from=$(python3 -c 'import os; print(os.path.dirname(os.__file__))')\n"
        "cp -r $from/*.py $from/asyncio $from/email $from/http $from/json /work\n"
        "python3 -m compileall -q -f /work"
    ),
    "ten small files, after 5 s of waiting": "sleep 5; for i in 1 2 3 4 5 6 7 8 9 10; do echo $i > /work/$i; done",
}
HEADER = (
    "| container, set-up | each its own | the first | later ones | times as fast | "
    f"{AT_ONCE} at once, own | {AT_ONCE} at once, shared |\n|---|---|---|---|---|---|---|"
)


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


async def ready_sec(factory: ContainerFactoryBase, task: HarborTask, setups: SharedSetups | None, n: int = 1) -> float:
    """Seconds until n attempts have asked their first question."""
    made = [
        CodeEnvironment([task], container_factory=factory, code_agent_factory=ShellAgentFactory(), shared_setups=setups)
        for _ in range(n)
    ]
    try:
        began = time.perf_counter()
        await asyncio.gather(*(env.reset() for env in made))
        return time.perf_counter() - began
    finally:
        await asyncio.gather(*(env.close() for env in made))


async def row(backend: str, name: str) -> None:
    """Prints one row."""
    factory = BACKENDS[backend]()
    own: list[float] = []
    shared: list[float] = []
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
    a, b = statistics.median(own), statistics.median(shared)
    cells = [f"{backend}, {name}", f"{a:.2f} s", f"{first:.2f} s", f"{b:.2f} s", f"{a / b:.1f}"]
    print("|", " | ".join([*cells, *(f"{seconds:.2f} s" for seconds in many)]), "|", flush=True)


async def main(backends: list[str]) -> None:
    """Prints the table."""
    print(HEADER, flush=True)
    for backend in backends or list(BACKENDS):
        for name in SETUPS:
            await row(backend, name)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
