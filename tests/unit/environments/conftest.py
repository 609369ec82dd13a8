import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.tasks.harbor_task import HarborTask, load_task
from tests.compatibility.case import write_task
from tests.unit.environments.steps import DOCKERFILE, FIRST, SECOND, TWO_STEPS, MakeSteps

PASSES_WITH_RESPONSE = (
    '#!/bin/sh\nif [ "$(cat /answer 2>/dev/null)" = 42 ]; then r=1; else r=0; fi; echo $r > /logs/verifier/reward.txt\n'
)

MakeTask = Callable[..., HarborTask]
MakeEnvironment = Callable[..., CodeEnvironment]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """Writes a task directory and loads it. By default the answer 42 in /answer is worth 1."""

    def make(
        name: str = "task", *, test: str = PASSES_WITH_RESPONSE, toml: str = "", solution: str | None = None
    ) -> HarborTask:
        files = {
            "task.toml": toml,
            "instruction.md": "Write 42 to /answer.\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\n",
            "tests/test.sh": test,
            "solution/solve.sh": solution,
        }
        return load_task(write_task(tmp_path / "tasks" / name, files))

    return make


@pytest.fixture
def make_steps(tmp_path: Path) -> MakeSteps:
    """Writes a task of two steps: the first is worth the lines of /work/log with `one`, the second 0.5."""

    def make(toml: str = TWO_STEPS, *, files: Mapping[str, str] | None = None) -> HarborTask:
        content = {
            "task.toml": toml,
            "instruction.md": None,
            "tests/test.sh": None,
            "environment/Dockerfile": DOCKERFILE,
            "steps/one/instruction.md": "Write one.\n",
            "steps/one/tests/test.sh": FIRST,
            "steps/one/solution/solve.sh": "#!/bin/sh\necho one > /work/log\n",
            "steps/two/instruction.md": "Write two.\n",
            "steps/two/tests/test.sh": SECOND,
            "steps/two/solution/solve.sh": "#!/bin/sh\necho two >> /work/log\n",
            **(files or {}),
        }
        return load_task(write_task(tmp_path / "tasks" / "steps", content))

    return make


@pytest.fixture
async def make_environment(make_task: MakeTask) -> AsyncIterator[MakeEnvironment]:
    """Makes environments in the local sandbox; closes them after the test."""
    factory = LocalContainerFactory()
    made: list[CodeEnvironment] = []

    def make(
        *tasks: HarborTask, agent: Any = None, limits: EpisodeLimits | None = None, **more: Any
    ) -> CodeEnvironment:
        env = CodeEnvironment(
            tasks or [make_task()],
            container_factory=factory,
            code_agent_factory=agent or ShellAgentFactory(command_timeout_sec=20),
            limits=limits or EpisodeLimits(),
            **more,
        )
        made.append(env)
        return env

    yield make
    await asyncio.gather(*(env.close() for env in made))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A place for snapshots, beside the tasks."""
    return tmp_path / "store"


@pytest.fixture
async def restore() -> AsyncIterator[Callable[..., Awaitable[CodeEnvironment]]]:
    """`CodeEnvironment.load_from_state`; what it gives is closed after the test."""
    made: list[CodeEnvironment] = []

    async def load(snapshot: EnvironmentSnapshot | Path, **options: Any) -> CodeEnvironment:
        made.append(await CodeEnvironment.load_from_state(snapshot, **options))
        return made[-1]

    yield load
    await asyncio.gather(*(env.close() for env in made))
