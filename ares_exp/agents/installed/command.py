"""`agent=command`: a user-defined program, given by its command, environment variables and files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.installed.installed_agent import AgentFile, InstalledAgentFactory, Launch, LaunchedCommand
from ares_exp.agents.interception.line import KEEPALIVE_SEC, BackgroundRequests
from ares_exp.agents.toolbox.package import PACKAGE_NAME
from ares_exp.agents.toolbox.package_store import Installed, digest_and_size
from ares_exp.agents.toolbox.placing import find_pack, ready_pack
from ares_exp.cancellation import in_thread
from ares_exp.containers.container import Mount
from ares_exp.containers.forwarded_port import FORWARDED_PORT
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.trajectories.request_diff import UserNormaliser

MOUNT_TARGET = "/opt/ares_exp/agent"
"""Path of the `agent.mount` directory in the container."""
MAX_FILLED_BYTES = 100_000
"""Maximum size in bytes of a file with `fill: true`, whose text has to fit into an environment variable."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_CONTEXT_VARIABLES = {"mcp_servers": "ARES_MCP_FILE", "skills_dir": "ARES_SKILLS"}
"""Environment variables with parts of a task. A command supports a part if its options contain the variable's name."""


class FileOption(BaseModel, extra="forbid", frozen=True):
    """A file of the option `agent.files`, with its contents given by `text` or by `path`.

    Attributes:
        text: Contents of the file.
        path: Path on the host of a text file with the contents.
        fill: Whether `$ARES_LLM_URL` and the other `$ARES_…` variables in the contents are replaced by their values.
        mode: Octal mode of the file, such as `"600"`.
    """

    text: str | None = None
    path: Path | None = None
    fill: bool = False
    mode: Annotated[str, Field(pattern=r"^[0-7]{3,4}$")] | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.text is None) == (self.path is None):
            raise ValueError("expected either `text` or `path`")
        return self


class CommandAgentFactory(InstalledAgentFactory):
    """Creates agents that run a user-defined command.

    Attributes:
        version: Name, version and digest of the package, and a digest of the files and the mounted directory; `None` if
            the agent has no package, no files and no mounted directory.
        supports: Names of supported parts of a task, such as `skills_dir`. A part is supported if an option contains
            the part's environment variable, such as `ARES_SKILLS`.
    """

    variables = ("ARES_LLM_URL", "ARES_LLM_KEY")

    @validate_call
    def __init__(
        self,
        *,
        command: Annotated[str, Field(min_length=1)],
        env: dict[str, str] | None = None,
        files: dict[str, Path | FileOption] | None = None,
        mount: Path | None = None,
        package: Annotated[str, Field(pattern=PACKAGE_NAME)] | None = None,
        name: Annotated[str, Field(pattern=r"^[\w.-]{1,60}$")] = "command",
        model_name: str | None = None,
        conversation_headers: list[str] | None = None,
        ok_exit_codes: list[int] | None = None,
        normalise: Annotated[list[UserNormaliser], Field(max_length=50)] | None = None,
        port: Annotated[int, Field(gt=0, lt=65000)] = FORWARDED_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
        background_requests: BackgroundRequests = "observe",
    ) -> None:
        """Validates the options.

        Args:
            command: Shell source, run in the container as the agent's user. Its standard input is the instruction. It
                gets the environment variables `ARES_LLM_URL`, `ARES_LLM_KEY`, `ARES_MODEL`, `ARES_INSTRUCTION_FILE`,
                `ARES_AGENT_DIR` (saved as `files/<episode>/agent/`), `ARES_MCP_FILE` (a JSON file with the task's MCP
                servers), `ARES_SKILLS` (the directory of the task's skills) and, with `mount`, `ARES_AGENT_MOUNT`.
            env: Additional environment variables. In their values, `$ARES_LLM_URL` and the agent's other variables are
                replaced.
            files: Text files to create in the container: path in the container → path on the host, or `{text, path,
                fill, mode}`. Set either `text` to the content or `path` to a file on the host. With `fill: true`,
                `$ARES_LLM_URL` and the other variables in the content are replaced. `mode: "600"` sets the mode.
            mount: Host directory to mount read-only at `$ARES_AGENT_MOUNT`.
            package: Name of a package (`ares-exp agents list`). It is mounted read-only, and its programs precede all
                others on `PATH`. If a package that ares_exp defines is missing, it is packed at the start of the run.
            name: Name of the agent in records.
            model_name: Model name that the agent sends in its requests. With `None`, the name is `policy`.
            conversation_headers: Names of request headers whose values identify the conversation.
            ok_exit_codes: Exit codes that count as success. Default: only 0.
            normalise: Patterns for the parts of requests that differ in every run, in addition to the built-in patterns
                (times, process ids): `{pattern, replacement}`. Resumes, branches and replays ignore these differences.
            port: Port on the container's loopback for requests to the LLM. If it is in use, the next ports are tried.
            keepalive_sec: Interval in seconds between keepalives while the program waits for a response.
            forward_sampling: Whether the requests to the policy include the agent's own sampling parameters.
            background_requests: Handling of background requests, which offer no tools (titles, summaries). `observe`
                makes each request an ordinary observation. `answer` sends each request to the policy without a step.
                Use `observe` for a program that never offers tools.
        """
        wrong = [path for path in files or {} if not path.startswith(("/", "~/"))]
        if wrong:
            raise ConfigError(
                "Expected the keys of `agent.files` to be paths in the container that start with `/` or `~/`, "
                f"got {wrong}."
            )
        super().__init__(
            model_name=model_name,
            port=port,
            keepalive_sec=keepalive_sec,
            forward_sampling=forward_sampling,
            background_requests=background_requests,
        )
        self.name = name
        self.described = f"The command of the agent {name}"
        self.conversation_headers = tuple(header.lower() for header in conversation_headers or ())
        self.normalisers = {one.pattern: (one.pattern, one.replacement) for one in normalise or ()}
        self.ok_exit_codes = (0,) if ok_exit_codes is None else ok_exit_codes
        self._command = command
        self._env = env or {}
        self._files = {
            target: file if isinstance(file, FileOption) else FileOption(path=file)
            for target, file in (files or {}).items()
        }
        self._mount = mount
        self._package = package
        self._packed: Installed | None = None
        texts = (file.text or "" for file in self._files.values() if file.fill)
        options = [command, *self._env.values(), *texts]
        names = {found[1] or found[2] for text in options for found in _VARIABLE.finditer(text)}
        self.supports = frozenset(part for part, variable in _CONTEXT_VARIABLES.items() if variable in names)
        self._texts: dict[str, str] = {}

    async def preflight(self) -> None:
        """Reads the files of `agent.files`, checks `agent.mount`, and packs the package if it is not installed.

        Raises:
            PreflightError: A file is missing, is not text or is too large, `agent.mount` is not a directory, or the
                package cannot be packed.
            ConfigError: No package has the name in `agent.package`.
        """
        mounts, version = await in_thread(self._read)
        if self._package is not None:
            self._packed = await ready_pack(self._package)
            mounts += (replace(self._packed.mount, needs_glibc=self._package),)
            packed = f"{self._package} {self._packed.version} {self._packed.digest}"
            version = f"{packed} {version}" if version else packed
        self.mounts, self.version = mounts, version  # at once, because other episodes may read them

    def _read(self) -> tuple[tuple[Mount, ...], str | None]:
        """Returns the mount of `agent.mount`, and a digest of all files; `None` without files."""
        mounts: tuple[Mount, ...] = ()
        for target, file in self._files.items():
            try:
                self._texts[target] = file.path.read_text("utf-8") if file.path is not None else file.text or ""
            except (OSError, UnicodeError) as error:
                raise PreflightError(f"Expected `agent.files` to name text files, got {file.path}: {error}") from None
            if file.fill and (size := len(self._texts[target].encode())) > MAX_FILLED_BYTES:
                raise PreflightError(
                    f"The file {target} in `agent.files` has {size} bytes, but with `fill: true` the limit is "
                    f"{MAX_FILLED_BYTES}. Remove `fill`, or shorten the file."
                )
        if self._mount is not None:
            if not self._mount.is_dir():
                raise PreflightError(f"Expected `agent.mount` to be a directory, got {self._mount}.")
            source = self._mount.resolve()
            mounts = (Mount(source, MOUNT_TARGET, digest_and_size(source)[0]),)
        parts = [f"{path}\0{text}\0{self._files[path].mode}" for path, text in sorted(self._texts.items())]
        parts += [one.digest for one in mounts]
        whole = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape"))
        return mounts, f"sha256:{whole.hexdigest()[:16]}" if parts else None

    async def find_program(self, container: AgentContainer) -> str:
        """Returns the path of the package in the container, or an empty string if no package is set.

        Raises:
            AgentInstallError: The package does not run in the container.
        """
        return await find_pack(container, self._packed) if self._packed is not None else ""

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode. Replaces `$ARES_…` variables in the environment variables and files."""
        known = launch.variables | ({"ARES_AGENT_MOUNT": MOUNT_TARGET} if self._mount is not None else {})
        path = f'PATH="{launch.program}/bin:$PATH"\n' if launch.program else ""
        return LaunchedCommand(
            f"{path}{self._command}",
            env={name: _filled(text, known) for name, text in self._env.items()}
            | {name: value for name, value in known.items() if name == "ARES_AGENT_MOUNT"},
            files={
                path: AgentFile(_filled(text, known) if file.fill else text, file.mode, is_secret=file.fill)
                for (path, file), text in zip(self._files.items(), self._texts.values(), strict=True)
            },
        )


def _filled(text: str, values: Mapping[str, Any]) -> str:
    """Replaces `$NAME` and `${NAME}` for each variable in `values`. The shell expands the other variables later."""
    return _VARIABLE.sub(lambda found: str(values.get(found[1] or found[2], found[0])), text)
