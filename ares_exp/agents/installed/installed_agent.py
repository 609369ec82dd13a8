"""The base of all third-party agents: an agent that starts a program in the container and waits for its exit.

The program sends its LLM requests over HTTP to a port in the container. The port is forwarded to this process.
`Launch` and `LaunchedCommand` describe the start of a program: its command, environment variables, files and MCP
servers. `PackagedAgentFactory` is the base for programs that are pinned packages of the toolbox.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer, AgentFactoryBase
from ares_exp.agents.interception.line import KEEPALIVE_SEC, BackgroundRequests, Line
from ares_exp.agents.toolbox.package import PACKAGES, Build
from ares_exp.agents.toolbox.placing import Placed, check_runs, fitting_build, ready_builds
from ares_exp.cancellation import finish, in_thread
from ares_exp.containers.container import ExecResult, Mount
from ares_exp.containers.forwarded_port import FORWARDED_PORT, ForwardedPort, ServingContainer
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import AgentError, AgentExitError, EndpointLostError, NoRequestError, PortForwardingError
from ares_exp.llms.request import LLMClient
from ares_exp.records.results import AgentFacts
from ares_exp.tasks.task_contract import AgentContext
from ares_exp.tasks.task_toml import McpServer

if TYPE_CHECKING:
    from ares_exp.agents.interception.agent_endpoint import Endpoint


AGENT_DIR = "/logs/agent"
"""Directory in the container for session files, saved as `files/<episode>/agent/`. The agent's user can write to it."""
MCP_FILE = f"{AGENT_DIR}/mcp.json"
"""Path of the file with the task's MCP servers, in the format of `mcp_json`."""
NO_SKILLS = f"{AGENT_DIR}/skills"
"""Empty directory that agents get as the directory of skills if a task has no skills."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Values for the command of one episode, which an agent's factory receives. All paths are container paths.

    Attributes:
        url: URL of the LLM, such as `http://127.0.0.1:61081`, without `/v1` and without a trailing slash.
        key: API key to send with each request.
        model: Model name to send in requests.
        instruction_file: Path of the file with the task's instruction.
        program: Return value of `InstalledAgentFactory.find_program`.
        context: Skills, MCP servers and earlier messages of the task.
    """

    url: str
    key: str
    model: str
    instruction_file: str
    program: str = ""
    context: AgentContext = field(default_factory=AgentContext)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the command of every agent gets. Its factory may add more variables."""
        return {
            "ARES_LLM_URL": self.url,
            "ARES_LLM_KEY": self.key,
            "ARES_MODEL": self.model,
            "ARES_INSTRUCTION_FILE": self.instruction_file,
            "ARES_AGENT_DIR": AGENT_DIR,
            "ARES_MCP_FILE": MCP_FILE,
            "ARES_SKILLS": self.context.skills_dir or NO_SKILLS,
        }

    def copy_skills(self, target: str) -> str:
        """Returns shell source that copies the task's skills to `target`. Empty if the task has no skills."""
        if self.context.skills_dir is None:
            return ""
        source, folder = shlex.quote(self.context.skills_dir), shlex.quote(target)
        return f"if [ -d {source} ]; then mkdir -p {folder} && cp -r {source}/. {folder}; fi\n"


@dataclass(frozen=True, slots=True)
class AgentFile:
    """A text file to create in the container before the agent's program starts.

    Attributes:
        text: Contents of the file.
        mode: Octal mode; `None` for the default mode of new files.
        is_secret: Whether the text contains the API key. If so, the text is never written to a disk of this machine.
    """

    text: str
    mode: str | None = None
    is_secret: bool = False


@dataclass(frozen=True, slots=True)
class LaunchedCommand:
    """The command that starts the agent.

    Attributes:
        command: Shell source, run as the agent's user in the container's working directory. Its standard input is the
            instruction, and its environment includes `Launch.variables`.
        env: Additional environment variables. Put the API key here, not into `command`, which is recorded.
        files: Text files to create before the start: path → file. They belong to the agent's user. A path is absolute
            or starts with `~/`.
    """

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, AgentFile] = field(default_factory=dict)


def mcp_json(servers: Sequence[McpServer]) -> str:
    """Returns MCP servers in the JSON format that most agents read: `{"mcpServers": {NAME: …}}`.

    Raises:
        AgentError: The headers of a server refer to variables of the host.
    """
    return json.dumps({"mcpServers": {server.name: mcp_entry(server) for server in servers}}, indent=1)


def mcp_entry(server: McpServer) -> dict[str, Any]:
    """Returns the JSON object that describes one MCP server in the format of `mcp_json`.

    Raises:
        AgentError: The headers of the server refer to variables of the host.
    """
    if any("${" in value for value in server.headers.values()):
        raise AgentError(
            f"The MCP server {server.name!r} of the task has headers with variables of this machine, which third-party "
            "agents do not receive, because they could print them. Leave the task out with env.exclude=[TASK]."
        )
    if server.transport == "stdio":
        return {"type": "stdio", "command": server.command, "args": list(server.args)}
    kind = "sse" if server.transport == "sse" else "http"
    return {"type": kind, "url": server.url, "headers": server.headers}


INSTRUCTION_FILE = f"{AGENT_DIR}/instruction.md"
OUTPUT_FILE = f"{AGENT_DIR}/output.txt"
SHOWN_BYTES = 4000
"""Number of bytes from the end of the program's output that are read after its exit, for error messages."""
SHOWN_LINES = 20
POLICY = "policy"
"""Default of the model name that agents send in their requests."""
_SETUP_SEC = 120.0
Result = TypeVar("Result")


class InstalledAgentFactory(AgentFactoryBase):
    """The base of the factories of third-party agents. A subclass finds the agent's program and builds its command.

    A program is not deterministic, so these agents cannot be replayed from a journal. The methods may be called for
    several episodes at the same time.

    Attributes:
        conversation_headers: Lower-case names of request headers whose values identify the conversations of one agent
            run. A request without these headers belongs to the main conversation.
        variables: Names of the variables or options that set the URL and key of the program's LLM, for error messages.
        ok_exit_codes: Exit codes that count as success.
        described: Description of the program at the start of an error message.
        mounts: Host directories with the program, mounted read-only into the container. Known after `preflight`. All
            containers get the same mounts. If several builds are mounted, `find_program` selects the one that fits.
    """

    deterministic = False
    can_be_restored = False
    needs_forwarded_port = True
    files_dir = AGENT_DIR
    name: str = ""
    described: str
    version: str | None = None
    conversation_headers: tuple[str, ...] = ()
    normalisers: Mapping[str, tuple[str, str]] = {}
    variables: tuple[str, ...] = ()
    supports: frozenset[str] = frozenset()
    ok_exit_codes: Collection[int] = (0,)
    mounts: tuple[Mount, ...] = ()

    def __init__(
        self,
        *,
        model_name: str | None,
        port: int,
        keepalive_sec: float,
        forward_sampling: bool,
        background_requests: BackgroundRequests = "observe",
    ) -> None:
        """Stores the options of the LLM endpoint, which `PackagedAgentFactory` describes."""
        self.model_name = model_name or POLICY
        self.port = port
        self.keepalive_sec = keepalive_sec
        self.forward_sampling = forward_sampling
        self.background_requests: BackgroundRequests = background_requests

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> InstalledAgent:
        """Creates an agent."""
        return InstalledAgent(self, container=container, llm_client=llm_client)

    @property
    def responds_in_background(self) -> bool:
        """Whether the option `background_requests` is `answer`."""
        return self.background_requests == "answer"

    @abstractmethod
    async def find_program(self, container: AgentContainer) -> str:
        """Finds the program in this container, and checks that it runs there.

        Returns the value for `Launch.program`: the path of the program, the shell words that start it, or an empty
        string if the agent does not need a program.

        Raises:
            AgentInstallError: The program does not run in the container. The message names the missing part.
            ContainerError: The container failed.
        """

    @abstractmethod
    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode."""


class InstalledAgent:
    """An agent that starts the program of its factory, serves its LLM requests, and checks its exit code."""

    def __init__(self, factory: InstalledAgentFactory, *, container: AgentContainer, llm_client: LLMClient) -> None:
        self._factory = factory
        self._container = container
        self._context = AgentContext()
        self._llm_client = llm_client
        self._line: Line | None = None
        self._version: str | None = None

    def set_context(self, context: AgentContext) -> None:
        """Stores the task's context, such as skills and MCP servers, which `run` passes to the program."""
        self._context = context

    @property
    def facts(self) -> AgentFacts:
        """Facts so far, such as the program's version and its number of requests."""
        report = self._line.report if self._line is not None else AgentFacts("")
        return replace(report, name=self._factory.name, version=self._version or self._factory.version)

    async def run(self, task: str) -> None:
        """Runs the program on `task` until it exits.

        Raises:
            NoRequestError: The program ended before the endpoint accepted a request from it.
            AgentExitError: The exit code of the program counts as a failure.
            AgentInstallError: The program does not run in this container.
            PortForwardingError: The container cannot open a forwarded port.
            EndpointLostError: The forwarded port was lost, so the program could not reach the LLM.
            ContainerError: The container failed.
        """
        program = await self._factory.find_program(self._container)
        async with self._served() as (line, forwarded_port):
            launch = Launch(
                url=forwarded_port.url,
                key=line.key,
                model=self._factory.model_name,
                instruction_file=INSTRUCTION_FILE,
                program=program,
                context=self._context,
            )
            launched = self._factory.command(launch)
            files = {INSTRUCTION_FILE: AgentFile(task), **launched.files}
            if "mcp_servers" in self._factory.supports:
                files[MCP_FILE] = AgentFile(mcp_json(self._context.mcp_servers))
            await self._make_files(files)
            command = (
                f"(\n{launched.command}\n) <{INSTRUCTION_FILE} >{OUTPUT_FILE} 2>&1; code=$?; "
                f"tail -c {SHOWN_BYTES} {OUTPUT_FILE}; exit $code"
            )
            work = self._container.exec(command, env={**launch.variables, **launched.env})
            result = await self._until_lost(work, forwarded_port)
        self._judge(result)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[tuple[Line, ForwardedPort]]:
        """Opens a `Line` for the program, and a forwarded port that leads to this line. Closes both on exit."""
        from ares_exp.agents.interception.agent_endpoint import Endpoint

        if not isinstance(self._container, ServingContainer):
            raise PortForwardingError(
                f"The agent needs a forwarded port to reach its LLM, but {type(self._container).__name__} cannot open "
                "one. Use container=local, container=docker or container=daytona."
            )
        factory, endpoint = self._factory, Endpoint.of_loop()
        line = self._line = Line(
            self._llm_client,
            conversation_headers=factory.conversation_headers,
            forward_sampling=factory.forward_sampling,
            keepalive_sec=factory.keepalive_sec,
            background_requests=factory.background_requests,
        )
        forwarded_port = await self._container.forward_port(
            lambda client: endpoint.serve(line, client), port=factory.port
        )
        try:
            yield line, forwarded_port
        finally:
            await finish(_close(forwarded_port, endpoint, line))

    async def _make_files(self, files: Mapping[str, AgentFile]) -> None:
        """Creates files in the container, owned by the agent's user. No recorded command contains their contents."""
        staging = f"{AGENT_DIR}/.files"
        folders = " ".join([AGENT_DIR, staging, *([NO_SKILLS] if "skills_dir" in self._factory.supports else [])])
        await self._succeed(f"mkdir -p {folders} && chmod 777 {folders}", user="root")
        async with working_directory("agent") as folder:
            shown = ["" if file.is_secret else file.text for file in files.values()]
            await in_thread(lambda: _write_numbered(folder, shown))
            await self._container.upload(folder, staging)
        steps: list[str] = []
        env: dict[str, str] = {}
        for number, (path, file) in enumerate(files.items()):
            target, source = _in_shell(path), f"cat {staging}/{number}"
            if file.is_secret:  # not uploaded, because uploads are first written to a disk of this machine
                env[f"ARES_FILE_{number}"], source = file.text, f'printf %s "$ARES_FILE_{number}"'
            steps.append(f"mkdir -p {_in_shell(str(Path(path).parent))} && {source} >{target}")
            steps += [f"chmod {file.mode} {target}"] if file.mode else []
        await self._succeed(" && ".join([*steps, f"rm -rf {staging}"]), env=env)

    async def _succeed(self, command: str, *, user: str | None = None, env: Mapping[str, str] | None = None) -> None:
        result = await self._container.exec(command, user=user, env=env, cwd="/", timeout_sec=_SETUP_SEC)
        if result.exit_code != 0:
            raise AgentError(f"The command `{command:.200}`, which sets up the agent, failed: {result.output:.500}")

    async def _until_lost(self, work: Coroutine[Any, Any, Result], forwarded_port: ForwardedPort) -> Result:
        """Awaits `work`. If the forwarded port is lost, cancels `work` and raises `EndpointLostError`."""
        running = asyncio.create_task(work)
        lost = asyncio.create_task(forwarded_port.lost())
        try:
            await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise EndpointLostError(f"The agent can no longer reach its LLM: {lost.result()}")
            return running.result()
        finally:
            for task in (running, lost):
                task.cancel()
            await finish(asyncio.wait({running, lost}))

    def _judge(self, result: ExecResult) -> None:
        """Raises an error if the program failed, or if none of its requests was accepted."""
        facts = self.facts
        if facts.requests == 0:
            cause = (
                f"without a request to its LLM. Pass it the endpoint with {', '.join(self._factory.variables)}."
                if not facts.refused
                else f"after all its requests to its LLM were rejected ({facts.refused}). The last error: "
                f"{facts.last_refusal}"
            )
            raise NoRequestError(
                f"The agent {facts.name} ended with exit code {result.exit_code} {cause} {last_lines(result)}"
            )
        if result.exit_code not in self._factory.ok_exit_codes:
            raise AgentExitError(
                f"{self._factory.described} ended with exit code {result.exit_code}. {last_lines(result)}"
            )


def last_lines(result: ExecResult) -> str:
    """Returns a sentence that quotes the last lines of a program's output."""
    lines = result.output.strip().splitlines()[-SHOWN_LINES:]
    return "It printed last:\n" + "\n".join(lines) if lines else "It printed nothing."


async def _close(forwarded_port: ForwardedPort, endpoint: Endpoint, line: Line) -> None:
    try:
        await forwarded_port.close()
    finally:
        await endpoint.close(line)


def _in_shell(path: str) -> str:
    """Quotes a path for the shell, except for `~/` at its start, which the shell expands to the home directory."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def _write_numbered(folder: Path, texts: list[str]) -> None:
    folder.chmod(0o755)
    for number, text in enumerate(texts):
        path = folder / str(number)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        path.chmod(0o644)


LibcChoice = Literal["auto", "glibc", "musl"]

LONGEST_WAIT_MS = 24 * 3600 * 1000
"""Time limit of one day, in milliseconds, for the agents' HTTP clients, so that the limits of the run apply first."""


class PackagedAgentFactory(InstalledAgentFactory):
    """The base of the factories whose program is the pinned package `name`. Subclasses define how it is started.

    Attributes:
        package: The pinned package.
    """

    @validate_call
    def __init__(
        self,
        *,
        model_name: str | None = None,
        subagents: bool = True,
        extra_args: list[str] | None = None,
        env: dict[str, str] | None = None,
        libc: LibcChoice = "auto",
        port: Annotated[int, Field(gt=0, lt=65000)] = FORWARDED_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
        background_requests: BackgroundRequests = "observe",
    ) -> None:
        """Validates the options. Only `preflight` accesses the disk.

        Args:
            model_name: Model name that the agent sends in its requests. Any name works, but the agent may select its
                prompts and tools by the name, and show the name to the model. With `None`, the name is `policy`.
            subagents: Whether the agent may start subagents. Each subagent has its own conversation.
            extra_args: Additional arguments of the program.
            env: Additional environment variables of the program.
            libc: Build to install: `glibc`, `musl` (for images without glibc, if available), or `auto`, which uses the
                installed builds, or installs the glibc build if there are none.
            port: Port on the container's loopback for requests to the LLM. If it is in use, the next ports are tried.
            keepalive_sec: Interval in seconds between keepalives while the agent waits for a response.
            forward_sampling: Whether the requests to the policy include the agent's own sampling parameters.
            background_requests: Handling of background requests, which offer no tools (titles, summaries). `observe`
                makes each request an ordinary observation. `answer` sends each request to the policy without a step.
        """
        super().__init__(
            model_name=model_name,
            port=port,
            keepalive_sec=keepalive_sec,
            forward_sampling=forward_sampling,
            background_requests=background_requests,
        )
        self.package = PACKAGES[self.name]
        self.version = self.package.version
        self.described = f"{self.package.title} {self.version}"
        self.subagents = subagents
        self.extra_args = tuple(extra_args or ())
        self.env = dict(env or {})
        self.pythons: Sequence[str] = ()
        self._libc = None if libc == "auto" else libc
        self._builds: tuple[Build, ...] = ()

    async def preflight(self) -> None:
        """Installs the package if it is missing. Raises `ToolboxError`, with a command to try again, if this fails."""
        installed = await ready_builds(self.package, libc=self._libc, pythons=self.pythons)
        self._builds = tuple(one.build for one in installed)
        self.mounts = tuple(one.mount for one in installed)

    async def find_program(self, container: AgentContainer) -> str:
        """Finds the build that fits the container, and returns the shell words that start its program.

        Raises:
            AgentInstallError: No build fits, or the program does not run in the container.
        """
        placed = await fitting_build(container, self.package, self._builds)
        await check_runs(container, self.package, placed.build, self.check(placed))
        return self.program(placed)

    @abstractmethod
    def program(self, placed: Placed) -> str:
        """Returns the shell words that start the program in the container."""

    def check(self, placed: Placed) -> str:
        """Returns a command that prints the pinned version if the program's file exists.

        Starting a program with `--version` would take up to 0.5 seconds in each episode.
        """
        return f"[ -x {self.program(placed)} ] && echo {self.version}"
