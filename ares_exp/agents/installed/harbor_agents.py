"""`agent=harbor`: unmodified agent classes of the package Harbor, which use the containers of ares_exp."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.installed.codex import CodexFactory
from ares_exp.agents.installed.command import MOUNT_TARGET, CommandAgentFactory
from ares_exp.agents.installed.installed_agent import (
    AGENT_DIR,
    INSTRUCTION_FILE,
    POLICY,
    AgentFile,
    InstalledAgent,
    Result,
)
from ares_exp.agents.interception.line import KEEPALIVE_SEC, BackgroundRequests
from ares_exp.agents.toolbox.installing import PYTHON
from ares_exp.agents.toolbox.package import PACKAGE_NAME
from ares_exp.cancellation import in_thread
from ares_exp.containers.container import ExecResult, User
from ares_exp.containers.forwarded_port import FORWARDED_PORT
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import AgentInstallError, ConfigError, ContainerError, PreflightError, TransferError
from ares_exp.llms.request import LLMClient
from ares_exp.records.secrets import EPISODE_KEY_PREFIX, mask_known_secrets
from ares_exp.tasks.task_contract import AgentContext
from ares_exp.trajectories.request_diff import UserNormaliser

if TYPE_CHECKING:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import ExecResult as HarborResult

ApiFormat = Literal["openai_chat_completions", "openai_responses", "anthropic_messages", "google_generate_content"]

_PROVIDERS = {
    "openai_chat_completions": "openai",
    "openai_responses": "openai",
    "anthropic_messages": "anthropic",
    "google_generate_content": "gemini",
}
"""Provider in the model name (`openai/NAME`) for each API."""
_KEY_VARIABLE = "ARES_LLM_KEY"
_PRICES = "LITELLM_LOCAL_MODEL_COST_MAP"
"""Variable that stops litellm from downloading its price list, in this process and in the container."""
_TRAJECTORY = "trajectory.json"
"""Name of the trajectory file that a class writes in Harbor's ATIF format."""
_SETUP_SEC = 360.0
"""Harbor's own time limit in seconds for `BaseAgent.setup`."""
_PACKAGES = {
    "aider": "aider",
    "copilot-cli": "copilot",
    "gemini-cli": "gemini_cli",
    "kimi-code": "kimi_code",
    "pi": "pi",
}
"""Names of Harbor's agents for which ares_exp has a package, and the names of the packages."""
_LINKS = {
    "deerflow": "/opt/harbor-deerflow-venv",
    "langgraph": "/opt/harbor-langgraph-venv",
    "mimo": "$HOME/.mimocode",
    "nemo-agent": "/opt/nvidia-nat-venv",
    "openhands": "/opt/openhands-venv",
    "openhands-sdk": "/opt/openhands-sdk-venv",
    "strands": "/installed-agent/strands/venv",
    "swe-agent": "/opt/sweagent-venv",
}
"""Directories in which the classes of some agents look for their programs. `link_programs` creates links there.

The other classes look in `~/.local/bin` or in the `PATH` that `~/.nvm/nvm.sh` sets.
"""
_SETUP = """\
mkdir -p ~/.local/bin ~/.nvm && touch ~/.local/bin/env || exit
[ -e ~/.nvm/nvm.sh ] || echo 'nvm() {{ :; }}' > ~/.nvm/nvm.sh
for program in {bin}/*; do [ ! -x "$program" ] || ln -sfn "$program" ~/.local/bin/ || exit; done
printf '%s\\n' "$(id -un)" "$PWD" "$PATH" ~
"""


class HarborEnvironment:
    """Adapter that gives Harbor's agents access to an `AgentContainer`.

    It has the methods and attributes of Harbor's `BaseEnvironment` that these agents use.

    Attributes:
        default_user: User of the agent's commands; `None` for root.
        env: Environment variables of every command.
        task_env_config: Object whose `workdir` is the working directory; `None` for the container's default.
        session_id: Constant id of the session. A random id would make the requests of each run differ.
        failure: First error of the container; `None` if there was none. It is stored because Harbor's classes may catch
            the error and raise another error.
    """

    session_id = "ares"
    default_user: str | None = None

    def __init__(self, container: AgentContainer, logs: Path) -> None:
        self._container = container
        self._logs = logs
        self._uploaded: set[Path] = set()
        self._cancelled = False
        self.env: dict[str, str] = {}
        self.failure: ContainerError | None = None
        self.task_env_config = SimpleNamespace(workdir=None)

    async def link_programs(self, root: str, link: str | None) -> None:
        """Links the programs in the container's `root/bin` into the directory where the Harbor class looks.

        Also sets `default_user` to the agent's user, and the working directory and `PATH` to the values for this user.

        Raises:
            AgentInstallError: The user has no home directory that can be written to.
        """
        program_dir = f"{root}/bin" if root else ""
        made = await self.exec(_SETUP.format(bin=program_dir or "/nonexistent"))
        if made.return_code != 0:
            raise AgentInstallError(f"Harbor's agents need a writable home directory in the container: {made.stderr}")
        user, workdir, path, home = (made.stdout or "").splitlines()
        self.default_user = None if user == "root" else user
        self.task_env_config.workdir = workdir
        self.env["PATH"] = f"{program_dir}:{path}" if root else path
        if root and link:
            venv = shlex.quote(link.replace("$HOME", home) + "/bin")
            python = f"for one in python python3; do ln -sfn {program_dir}/{PYTHON} {venv}/$one; done"
            links = f"ln -sfn {program_dir}/* {venv} && touch {venv}/activate && {python}"
            await self.exec(f"mkdir -p {venv} && {links}", user="root")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_sec: float | None = None,
        user: User | None = None,
    ) -> HarborResult:
        """Runs a command with the environment variables in the argument `env` and in the attribute `env`.

        A variable in the argument is not passed if it contains a secret of this machine. The variables in the attribute
        come from the config, which may set them to such secrets.
        """
        from harbor.environments.base import ExecResult as HarborResult

        # In Harbor, the host directory of the class's logs is mounted, so the class expects its files in the container.
        new = {path for path in self._logs.iterdir() if path.is_file()} - self._uploaded
        for path in new:
            self._uploaded.add(path)
            await self.upload_file(path, f"{AGENT_DIR}/{path.name}")
        own = {
            name: value
            for name, value in (env or {}).items()
            if EPISODE_KEY_PREFIX in value or mask_known_secrets(value) == value
        }
        result = await self._watched(
            self._container.exec(
                command, cwd=cwd, env={**own, **self.env}, user=user, timeout_sec=timeout_sec, separate_stderr=True
            )
        )
        code = 124 if result.exit_code is None else result.exit_code
        return HarborResult(stdout=result.output, stderr=result.stderr, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file into the container."""
        await self._watched(self._container.upload(source_path, target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a directory into the container."""
        await self.upload_file(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file from the container."""
        await self._watched(self._container.download(source_path, target_path))

    async def is_dir(self, path: str, user: User | None = None) -> bool:
        """Returns whether a path is a directory."""
        return bool((await self.exec(f"test -d {shlex.quote(path)}", user=user)).return_code == 0)

    async def _watched(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Awaits a call to the container, and stores its error in `failure`.

        If a call was cancelled, later calls are cancelled immediately, so that cleanup code of the class runs no
        commands.
        """
        if self._cancelled:
            call.close()
            raise asyncio.CancelledError
        try:
            return await call
        except asyncio.CancelledError:
            self._cancelled = True
            raise
        except TransferError:
            raise
        except ContainerError as error:
            self.failure = self.failure or error
            raise


class HarborAgent(InstalledAgent):
    """An agent that runs an instance of a Harbor class and serves the LLM requests of its program."""

    _factory: HarborAgentFactory

    async def run(self, task: str) -> None:
        """Runs Harbor's class on `task`; see `InstalledAgent.run`."""
        mount = MOUNT_TARGET if self._factory.mounts else ""
        root = await self._factory.find_program(self._container) or mount
        async with working_directory("agent") as folder, self._served() as (line, port):
            await self._make_files({INSTRUCTION_FILE: AgentFile(task)})
            agent = self._factory.create(folder, port.url, line.key, self._context)
            error = await self._until_lost(self._run(agent, task, root, folder), port)
        self._judge(ExecResult(error, 1 if error else 0, 0.0))

    async def _run(self, agent: BaseAgent, task: str, root: str, logs: Path) -> str:
        """Runs the setup and the agent of the Harbor class, and saves the trajectory file that the class writes.

        Returns the text of the error that the class raised, or `""` without an error. Raises errors of the container.
        """
        from harbor.models.agent.context import AgentContext as HarborContext

        context, error = HarborContext(), ""
        environment = HarborEnvironment(self._container, logs)
        await environment.link_programs(root, self._factory.link)
        environment.env.update(agent.extra_env)
        try:
            async with asyncio.timeout(_SETUP_SEC):
                await agent.setup(environment)
            await agent.run(task, environment, context)
        except Exception as raised:  # the class decides which errors it raises
            if environment.failure is not None:
                raise environment.failure from None
            error = f"{type(raised).__name__}: {raised}"
        self._version = (agent.version() or "").partition("\n")[0] or None
        with suppress(Exception):  # Harbor also only logs an error of this part
            await environment.download_file(AGENT_DIR, logs)
            await in_thread(lambda: agent.populate_context_post_run(context))
            await environment.upload_file(logs / _TRAJECTORY, f"{AGENT_DIR}/{_TRAJECTORY}")
        return error


class HarborAgentFactory(CommandAgentFactory):
    """Creates agents that run one of Harbor's agent classes.

    Attributes:
        link: Directory in which the class looks for its program; see `_LINKS`.
    """

    variables = ("agent.api_format", "agent.kwargs")

    @validate_call
    def __init__(
        self,
        *,
        name: Annotated[str, Field(min_length=1)],
        version: str | None = None,
        model_name: str = POLICY,
        api_format: ApiFormat | None = None,
        env: dict[str, str] | None = None,
        kwargs: dict[str, Any] | None = None,
        package: Annotated[str, Field(pattern=PACKAGE_NAME)] | None = None,
        mount: Path | None = None,
        normalise: Annotated[list[UserNormaliser], Field(max_length=50)] | None = None,
        port: Annotated[int, Field(gt=0, lt=65000)] = FORWARDED_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
        background_requests: BackgroundRequests = "observe",
    ) -> None:
        """Validates the options. Options that also exist in Harbor have the same meaning as there.

        Args:
            name: Name of an agent of Harbor (`harbor run --agent NAME`), or the import path of a class.
            version: Version of the agent's program, which is passed to the class.
            model_name: Model name that the agent sends in its requests, with or without its provider.
            api_format: API of the requests. Default: Chat Completions if the class supports it, otherwise the first of
                Responses, Messages and generateContent that the class supports.
            env: Additional environment variables of the class and of its commands.
            kwargs: Arguments of the class, as `--agent-kwarg` sets them.
            package: Name of the package with the program (`ares-exp agents list`). Default: the package of ares_exp for
                this agent, if there is one. Otherwise, the program has to be in the image.
            mount: Host directory with the program in `bin/`, mounted read-only instead of a package.
            normalise: Patterns for the parts of requests that differ in every run, in addition to the built-in
                patterns: `{pattern, replacement}`. Resumes, branches and replays ignore these differences.
            port: Port on the container's loopback for requests to the LLM. If it is in use, the next ports are tried.
            keepalive_sec: Interval in seconds between keepalives while the agent waits for a response.
            forward_sampling: Whether the requests to the policy include the agent's own sampling parameters.
            background_requests: Handling of background requests, which offer no tools (titles, summaries). `observe`
                makes each request an ordinary observation. `answer` sends each request to the policy without a step.
        """
        found = _class_of(name)
        super().__init__(
            command="exit 1",  # unused: Harbor's class starts the program
            mount=mount,
            package=package or (_PACKAGES.get(name) if mount is None else None),
            model_name=model_name,
            normalise=normalise,
            port=port,
            keepalive_sec=keepalive_sec,
            forward_sampling=forward_sampling,
            background_requests=background_requests,
        )
        self.name = "harbor-" + name.rpartition(":")[2]
        self.described = f"The command of the agent {self.name}"
        if name == CodexFactory.name:
            self.normalisers = {**CodexFactory.normalisers, **self.normalisers}
        parts = {"mcp_servers": found.capabilities.mcp_servers, "skills_dir": found.capabilities.skills}
        self.supports = frozenset(part for part, is_supported in parts.items() if is_supported)
        self.link = _LINKS.get(name)
        self._class_name = name
        self._api_format = api_format or _api_format(name, found)
        provider = _PROVIDERS[self._api_format]
        self._model_name = model_name if "/" in model_name else f"{provider}/{model_name}"
        self._env = env or {}
        self._kwargs = {"skip_install": True, "version": version, **(kwargs or {})}

    async def preflight(self) -> None:
        """Packs the package if it is missing. Raises `ConfigError` if the Harbor class rejects its `kwargs`."""
        await super().preflight()
        async with working_directory("agent") as folder:
            try:
                await in_thread(lambda: self.create(folder, "http://127.0.0.1:1", "-", AgentContext()))
            except (ValueError, TypeError, OSError) as error:
                raise ConfigError(
                    f"Harbor's agent `{self._class_name}` rejects the options in `agent.kwargs`: {error}"
                ) from None

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> HarborAgent:
        """Creates an agent."""
        return HarborAgent(self, container=container, llm_client=llm_client)

    def create(self, logs: Path, url: str, key: str, context: AgentContext) -> BaseAgent:
        """Creates the instance of the Harbor class for one episode, which sends its LLM requests to `url`."""
        from harbor.agents.factory import AgentFactory
        from harbor.models.task.config import MCPServerConfig
        from harbor.models.trial.config import AgentConfig

        config = AgentConfig(
            name=self._class_name,
            model_name=self._model_name,
            base_url=f"{url}/v1" if self._api_format.startswith("openai") else url,
            model_api_format=self._api_format,
            model_api_key_name=_KEY_VARIABLE,
            env={_KEY_VARIABLE: key, _PRICES: "True", **self._env},
            kwargs=self._kwargs,
        )
        more: dict[str, Any] = {}
        if context.mcp_servers:
            more["mcp_servers"] = [MCPServerConfig(**server.model_dump()) for server in context.mcp_servers]
        if context.skills_dir:
            more["skills_dir"] = context.skills_dir
        return AgentFactory.create_agent_from_config(config, logs_dir=logs, **more)


def _class_of(name: str) -> type[BaseAgent]:
    """Returns the Harbor class for an agent's name or the import path of a class.

    Raises `PreflightError` if Harbor is not installed, and `ConfigError` if the name is unknown.
    """
    os.environ.setdefault(_PRICES, "True")
    try:
        from harbor.agents.factory import AgentFactory
        from harbor.models.trial.config import AgentConfig
    except ImportError:
        version = ".".join(map(str, sys.version_info[:2]))
        raise PreflightError(
            f"agent=harbor needs Harbor and Python 3.12 or newer, got Python {version}: pip install 'ares-exp[harbor]'."
        ) from None
    try:
        found: type[BaseAgent] = AgentFactory.get_agent_class_from_config(AgentConfig(name=name))
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"Expected `agent.name` to be an agent of Harbor, got `{name}`. {error}") from None
    return found


def _api_format(name: str, found: type[BaseAgent]) -> ApiFormat:
    """Returns the first API in `ApiFormat` that a class supports.

    Raises `ConfigError` if the class supports none of them, or if the URL of its LLM cannot be set.
    """
    spec = found.MODEL_CONNECTION
    if spec is None or not found.capabilities.base_url:
        raise ConfigError(f"Harbor's agent `{name}` has no option for the URL of its LLM. Use another agent.")
    formats = [str(one) for one in spec.supported_api_formats or ()]
    for one in get_args(ApiFormat):
        if one in formats:
            return cast(ApiFormat, one)
    raise ConfigError(
        f"Harbor's agent `{name}` supports only the LLM APIs {formats}. Use an agent for {', '.join(_PROVIDERS)}."
    )
