"""Steps of ARES, for `bench_step`: its code environment with the same trivial agents and a container in memory.

Where the package `martian-ares` is installed beside ours; it needs Python 3.12. Imported, it asks a hosted registry for
its data sets, which is answered with none here.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def is_installed() -> bool:
    """Whether there is something to compare with."""
    return importlib.util.find_spec("ares") is not None


class AresSteps:
    """Runs episodes of ARES' `CodeEnvironment`."""

    def __init__(self, folder: Path, steps: int) -> None:
        """Imports it, and makes a task.

        Args:
            folder: An empty one, for the task's files.
            steps: How often the agent asks.
        """
        registry = importlib.import_module("harbor.registry.client")
        registry.RegistryClientFactory.create = lambda *_, **__: SimpleNamespace(get_datasets=tuple)
        self._environments = importlib.import_module("ares.environments.code_env")
        self._containers = importlib.import_module("ares.containers.containers")
        self._requests = importlib.import_module("ares.llms.request")
        responses = importlib.import_module("ares.llms.response")
        self._response = responses.LLMResponse(
            data=[responses.TextData(content="I look around.\n\n```bash\nls -la\n```\n")],
            cost=0.0,
            usage=responses.Usage(prompt_tokens=0, generated_tokens=0),
        )
        for part in ("tests", "environment"):
            (folder / part).mkdir()
        (folder / "tests" / "test.sh").write_text("exit 0\n")
        given = SimpleNamespace(docker_image="memory", cpus=1, memory_mb=1024, storage_mb=1024)
        self._task = SimpleNamespace(
            name="bench",
            instruction="Do it.",
            config=SimpleNamespace(environment=given),
            paths=SimpleNamespace(
                environment_dir=folder / "environment",
                tests_dir=folder / "tests",
                test_path=folder / "tests" / "test.sh",
            ),
        )
        self._steps = steps

    async def execute(self, *, with_command: bool) -> None:
        """Runs an episode."""
        environment = self._environments.CodeEnvironment(
            [self._task], container_factory=self, code_agent_factory=self._agents(with_command=with_command)
        )
        async with environment:
            time_step = await environment.reset()
            while time_step.step_type != "LAST":
                time_step = await environment.step(self._response)

    def _agents(self, *, with_command: bool) -> Any:
        make, steps = self._requests.LLMRequest, self._steps

        class Trivial:
            def __init__(self, *, container: Any, llm_client: Any) -> None:
                self._container, self._llm_client = container, llm_client

            async def run(self, task: str) -> None:
                request = make(messages=[{"role": "user", "content": task}])
                for _ in range(steps):
                    await self._llm_client(request)
                    if with_command:
                        await self._container.exec_run("ls")

        return Trivial

    def from_image(self, **_: Any) -> Any:
        """Makes a container, as a factory of theirs does."""
        return _InMemoryContainer(self._containers.ExecResult)

    from_dockerfile = from_image


class _InMemoryContainer:
    """Answers every command at once; the reward is 1."""

    def __init__(self, result: Any) -> None:
        self._result = result

    async def start(self, env: object = None) -> None: ...
    async def stop(self) -> None: ...
    async def upload_dir(self, **_: object) -> None: ...

    async def exec_run(self, command: str, **_: object) -> Any:
        return self._result(output="1.0" if command.startswith("cat") else "ok\n", exit_code=0)
