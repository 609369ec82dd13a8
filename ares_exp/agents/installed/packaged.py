"""The base of the factories of agents whose program is a pinned package of the toolbox."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.installed.installed_agent import InstalledAgentFactory
from ares_exp.agents.interception.line import KEEPALIVE_SEC, BackgroundRequests
from ares_exp.agents.toolbox.package import PACKAGES, Build
from ares_exp.agents.toolbox.placing import Placed, check_runs, fitting_build, ready_builds
from ares_exp.containers.forwarded_port import FORWARDED_PORT

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
