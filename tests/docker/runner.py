"""A process that runs the container of one task until its stdin ends, or until it is killed."""

import os
import subprocess
import sys
from pathlib import Path

RUNNER = """
import asyncio, sys
from pathlib import Path
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

async def main():
    image, context, file = (word or None for word in sys.argv[1:])
    paths = {"context_dir": context and Path(context), "compose_file": file and Path(file)}
    box = DockerContainerFactory()(ContainerSpec("killed", docker_image=image, **paths))
    print(box.project_name if file else box.container_name, flush=True)
    async with box:
        print((await box.exec("echo up")).output, end="", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


class Runner:
    """The process, the leader of a process group.

    Attributes:
        process: The process. It prints "up" once its container runs.
        name: The name of its container, or of its compose project.
    """

    def __init__(
        self, image: str = "", *, context: Path | str = "", file: Path | str = "", host: str | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, image, str(context), str(file)],
            env={**os.environ, **({"DOCKER_HOST": host} if host else {})},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.name = self.line()

    def line(self) -> str:
        return self.process.stdout.readline().strip()
