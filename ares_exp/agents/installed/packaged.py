"""Recipes whose program is a pinned package of the toolbox, and what their factories have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.installed.installed_agent import POLICY, EndpointOptions, InstalledAgentFactory, last_lines
from ares_exp.agents.installed.recipe import Launch, LaunchedCommand
from ares_exp.agents.interception.line import KEEPALIVE_SEC, BackgroundRequests
from ares_exp.agents.toolbox.package import PACKAGES, AgentPackage, Build
from ares_exp.agents.toolbox.placing import Placed, check_runs, fitting_build, ready_builds
from ares_exp.containers.container import ExecResult, Mount
from ares_exp.containers.forwarded_port import FORWARDED_PORT
from ares_exp.errors import AgentExitError

LibcChoice = Literal["auto", "glibc", "musl"]

LONGEST_WAIT_MS = 24 * 3600 * 1000
"""The time limits of agents' clients: a policy may think as long as the run's own limits let it."""


class PackagedRecipe:
    """A recipe of a pinned package. Subclasses say how its program is started.

    Attributes:
        package_name: Name of the package.
        ok_exit_codes: Exit codes that are no failure.
        subagents: Whether it may start agents of its own, where it has any.
    """

    package_name: ClassVar[str]
    conversation_headers: tuple[str, ...] = ()
    normalisers: Mapping[str, tuple[str, str]] = {}
    variables: tuple[str, ...] = ()
    supports: frozenset[str] = frozenset()
    ok_exit_codes: frozenset[int] = frozenset({0})
    subagents: bool = True
    offers_tools: bool = True

    def __init__(
        self,
        *,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        libc: LibcChoice = "auto",
        pythons: Sequence[str] = (),
    ) -> None:
        """Touches nothing.

        Args:
            extra_args: More arguments of the program.
            env: More variables of it, laid over the recipe's.
            libc: Whose build is installed if it is not there; `"auto"`: those that are there, else glibc's.
            pythons: Minor versions of Python for which it is installed if it is not there.
        """
        self.extra_args = tuple(extra_args)
        self.env = dict(env or {})
        self._libc = None if libc == "auto" else libc
        self._pythons = tuple(pythons)
        self._builds: tuple[Build, ...] = ()
        self._mounts: tuple[Mount, ...] = ()

    @property
    def package(self) -> AgentPackage:
        """The pinned package."""
        return PACKAGES[self.package_name]

    @property
    def name(self) -> str:
        """The package's."""
        return self.package_name

    @property
    def version(self) -> str | None:
        """The package's."""
        return self.package.version

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Every build that is installed."""
        return self._mounts

    async def preflight(self) -> None:
        """Installs the package if it is not there.

        Raises:
            ToolboxError: It cannot be installed; with the command to try again.
        """
        installed = await ready_builds(self.package, libc=self._libc, pythons=self._pythons)
        self._builds = tuple(one.build for one in installed)
        self._mounts = tuple(one.mount for one in installed)

    async def find_program(self, container: AgentContainer) -> str:
        """Finds the build that fits the container, and sees that it runs there.

        Returns:
            The program, as words of a shell.

        Raises:
            AgentInstallError: None fits, or it does not run there.
        """
        placed = await fitting_build(container, self.package, self._builds)
        await check_runs(container, self.package, placed.build, self.check(placed))
        return self.program(placed)

    def program(self, placed: Placed) -> str:
        """Returns the program in the container, as words of a shell."""
        raise NotImplementedError

    def check(self, placed: Placed) -> str:
        """Returns a command that prints the version, if the program runs in the container."""
        return f"{self.program(placed)} --version"

    def command(self, launch: Launch) -> LaunchedCommand:
        """Writes the command of one episode."""
        raise NotImplementedError

    def ended(self, result: ExecResult) -> None:
        """Refuses every exit code but those that are no failure."""
        if result.exit_code not in self.ok_exit_codes:
            raise AgentExitError(
                f"{self.package.title} {self.version} ended with exit code {result.exit_code}. {last_lines(result)}"
            )


class PackagedAgentFactory(InstalledAgentFactory):
    """Makes agents of one package, with the options that most packages have.

    Attributes:
        recipe_type: The recipe.
    """

    recipe_type: ClassVar[type[PackagedRecipe]]

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
        """Validates the options.

        Args:
            model_name: The name of the model that it is told to ask for; any name works. It may choose its prompts and
                tools by the name, and show it to the model. `None`: `policy`.
            subagents: Whether it may start agents of its own; each is a conversation.
            extra_args: More arguments of the program.
            env: More variables of it.
            libc: The build to be installed: `glibc`, `musl` (for images without glibc, where there is one), or `auto`:
                what is installed already, else glibc's.
            port: The port of its LLM in the container that is tried first.
            keepalive_sec: After how many seconds, each time, it is sent something while it waits for a response.
            forward_sampling: Whether its own sampling parameters are put into the requests that the policy gets.
            background_requests: What becomes of calls beside its work, which offer no tools (titles, summaries):
                `observe`: each is an observation like any other; `response`: the policy answers it without a step.
        """
        recipe = self.recipe_type(extra_args=extra_args or (), env=env, libc=libc)
        recipe.subagents = subagents
        super().__init__(
            recipe, EndpointOptions(model_name or POLICY, port, keepalive_sec, forward_sampling, background_requests)
        )
