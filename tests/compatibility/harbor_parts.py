"""An environment and an agent for Harbor's own code: a plain container without compose, and a script."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from tests.compatibility.case import DONE


class PlainContainer(BaseEnvironment):
    """`docker build`, `docker run`, `docker exec` and `docker cp`, as the specification tells them."""

    container = ""
    image = ""

    @staticmethod
    def type() -> str:
        return "plain"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image and not (self.environment_dir / "Dockerfile").exists():
            raise FileNotFoundError(self.environment_dir)

    async def start(self, force_build: bool) -> None:
        self.image = self.task_env_config.docker_image or await _docker("build", "-q", str(self.environment_dir))
        options = [word for name, value in self._startup_env().items() for word in ("-e", f"{name}={value}")]
        if self.task_env_config.workdir:
            options += ["-w", self.task_env_config.workdir]
        if self._network_policy.network_mode == NetworkMode.NO_NETWORK:
            options += ["--network", "none"]
        command = ("sh", "-c", "sleep infinity")
        self.container = await _docker("run", "-d", "--init", *options, self.image, *command)
        await self.ensure_dirs(self._mount_targets())
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if self.container:
            await _docker("rm", "-f", "-v", self.container)
        if self.image.startswith("sha256:"):
            await _docker("rmi", self.image, check=False)
        self.container = self.image = ""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user = self._resolve_user(user)
        options = [word for name, value in (self._merge_env(env) or {}).items() for word in ("-e", f"{name}={value}")]
        options += ["-u", str(user)] if user is not None else []
        options += ["-w", place] if (place := cwd or self.task_env_config.workdir) else []
        try:
            async with asyncio.timeout(timeout_sec or None):
                code, out, err = await _run("exec", *options, self.container, "bash", "-c", command)
        except TimeoutError:
            raise RuntimeError(f"{command} took too long") from None
        return ExecResult(return_code=code, stdout=out, stderr=err)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await _docker("cp", str(source_path), f"{self.container}:{target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p '{target_dir}'", cwd="/", user="root")
        await _docker("cp", f"{source_dir}/.", f"{self.container}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await _docker("cp", f"{self.container}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        await _docker("cp", f"{self.container}:{source_dir}/.", str(target_dir))


class ScriptedAgent(BaseAgent):
    """Runs the commands of an episode's case; each step's commands run in that step."""

    capabilities = AgentCapabilities(load_atif_trajectory=True, skills=True)

    def __init__(self, *args: Any, commands: Sequence[str], raises: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._commands = list(commands)
        self._raises = raises

    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        while self._commands and (command := self._commands.pop(0)) != DONE:
            await environment.exec(command)
            if self._raises:
                raise RuntimeError("on purpose")

    async def load(self, instruction: str, environment: BaseEnvironment, context: Any, **options: Any) -> None:
        await self.run(instruction, environment, context)


async def _docker(*arguments: str, check: bool = True) -> str:
    code, out, err = await _run(*arguments)
    if check and code != 0:
        raise RuntimeError(f"docker {' '.join(arguments)}: {err}")
    return out.strip()


async def _run(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *("docker", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")
