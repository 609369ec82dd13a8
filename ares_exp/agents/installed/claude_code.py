"""`agent=claude_code`: Claude Code, Anthropic's agent, unmodified."""

from __future__ import annotations

import shlex
import uuid
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.installed.installed_agent import EndpointOptions, InstalledAgentFactory
from ares_exp.agents.installed.packaged import LONGEST_WAIT_MS, LibcChoice, PackagedRecipe
from ares_exp.agents.installed.recipe import Launch, LaunchedCommand
from ares_exp.agents.toolbox.placing import Placed
from ares_exp.containers.door import DOOR_PORT
from ares_exp.interception.line import KEEPALIVE_SEC

_SESSION = str(uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/ares-exp/ares_exp"))
"""The session of every episode: two runs with the same answers ask the same."""
_OF_THE_PROVIDER = ("WebSearch", "WebFetch")
_SUBAGENTS = ("Agent", "Task", "Workflow")
_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
_SWITCHED_OFF = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",  # telemetry, error reports, updates, side calls
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",  # with them, tools are deferred, and requests change their shape
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK",  # would ask the same again, not streamed
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE",
    "CLAUDE_CODE_DISABLE_CRON",
)


class ClaudeCodeRecipe(PackagedRecipe):
    """How Claude Code is started in its print mode."""

    package_name = "claude_code"
    lane_headers = ("x-claude-code-agent-id",)
    variables = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
    subagents = True

    def program(self, placed: Placed) -> str:
        """Returns its only file."""
        return placed.path("claude")

    def command(self, launch: Launch) -> LaunchedCommand:
        """Writes the command: the instruction comes by stdin."""
        refused = (*_OF_THE_PROVIDER, *(() if self.subagents else _SUBAGENTS))
        arguments = [
            *("--print", "--verbose", "--output-format=stream-json", "--permission-mode=bypassPermissions"),
            *("--session-id", _SESSION, "--disallowedTools", ",".join(refused), *self.extra_args),
        ]
        env = {
            "ANTHROPIC_BASE_URL": launch.url,
            "ANTHROPIC_API_KEY": launch.key,
            **dict.fromkeys(_MODELS, launch.model),
            **dict.fromkeys(_SWITCHED_OFF, "1"),
            "IS_SANDBOX": "1",  # without it permissions cannot be bypassed as root
            "MCP_CONNECTION_NONBLOCKING": "false",
            "API_TIMEOUT_MS": str(LONGEST_WAIT_MS),
            "CLAUDE_CONFIG_DIR": f"{launch.directory}/claude",
            **self.env,
        }
        return LaunchedCommand(f"{launch.program} {shlex.join(arguments)}", env=env)


class ClaudeCodeFactory(InstalledAgentFactory):
    """Makes agents that are Claude Code."""

    @validate_call
    def __init__(
        self,
        *,
        model_name: str = "policy",
        subagents: bool = True,
        extra_args: list[str] | None = None,
        env: dict[str, str] | None = None,
        libc: LibcChoice = "auto",
        port: Annotated[int, Field(gt=0, lt=65000)] = DOOR_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
    ) -> None:
        """Validates the options.

        Args:
            model_name: The name of the model that it is told to ask for; it shows it to the model.
            subagents: Whether it may start agents of its own; each is a lane.
            extra_args: More arguments of `claude`.
            env: More variables of it.
            libc: The build to be installed: `glibc`, `musl` (for images without glibc), or `auto`: what is installed
                already, else glibc's.
            port: The port of its LLM in the container that is tried first.
            keepalive_sec: After how many seconds, each time, it is sent something while it waits for an answer.
            forward_sampling: Whether its own sampling parameters are put into the requests that the policy gets.
        """
        recipe = ClaudeCodeRecipe(extra_args=extra_args or (), env=env, libc=libc)
        recipe.subagents = subagents
        super().__init__(recipe, EndpointOptions(model_name, port, keepalive_sec, forward_sampling))
