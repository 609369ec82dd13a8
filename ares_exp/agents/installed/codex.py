"""`agent=codex`: Codex, OpenAI's agent, unmodified."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.installed.installed_agent import POLICY, EndpointOptions, InstalledAgentFactory
from ares_exp.agents.installed.packaged import LONGEST_WAIT_MS, PackagedRecipe
from ares_exp.agents.installed.recipe import Launch, LaunchedCommand
from ares_exp.agents.interception.line import KEEPALIVE_SEC
from ares_exp.agents.toolbox.placing import Placed
from ares_exp.containers.forwarded_port import FORWARDED_PORT

_CONFIG = """\
model = {model}
model_provider = "ares"
check_for_update_on_startup = false
allow_login_shell = false  # Debian's profile resets PATH
web_search = "disabled"

[model_providers.ares]
name = "ares"
base_url = {base_url}
env_key = "ARES_LLM_KEY"
wire_api = "responses"
request_max_retries = 10
stream_max_retries = 10
stream_idle_timeout_ms = {idle_ms}

[analytics]
enabled = false

[features]
plugins = false
apps = false
goals = false

[agents]
enabled = {subagents}

[skills.bundled]  # they fetch from the network, and generate images
enabled = false
"""
_STATE = "/tmp/ares_exp-codex"
"""Where its databases go, which nobody reads again."""


class CodexRecipe(PackagedRecipe):
    """How `codex exec` is started."""

    package_name = "codex"
    variables = ("model_providers.ares.base_url in $CODEX_HOME/config.toml",)
    normalisers: Mapping[str, tuple[str, str]] = {
        "codex_chunks": (r"Chunk ID: [0-9a-f]+", "Chunk ID: <id>"),
        "codex_wall_times": (r"Wall time: [0-9.]+ seconds", "Wall time: <time>"),
    }
    subagents = False
    idle_timeout_ms = LONGEST_WAIT_MS

    def program(self, placed: Placed) -> str:
        """Returns the program, whose folder bears the name of its platform."""
        machine = {"x64": "x86_64", "arm64": "aarch64"}[placed.build.machine]
        return placed.path("vendor", f"{machine}-unknown-linux-musl", "bin", "codex")

    @property
    def conversation_headers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Every thread is a conversation; without agents of its own there is one."""
        return ("thread-id",) if self.subagents else ()

    def command(self, launch: Launch) -> LaunchedCommand:
        """Writes the command, and its configuration; the instruction comes by stdin."""
        home = f"{launch.directory}/codex"
        arguments = [
            *("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json"),
            *(*self.extra_args, "-"),
        ]
        config = _CONFIG.format(
            model=json.dumps(launch.model),
            base_url=json.dumps(f"{launch.url}/v1"),
            idle_ms=self.idle_timeout_ms,
            subagents=str(self.subagents).lower(),
        )
        return LaunchedCommand(
            f'{launch.program} {shlex.join(arguments)}; code=$?; rm -rf "$CODEX_HOME/tmp"; exit $code',
            env={"CODEX_HOME": home, "CODEX_SQLITE_HOME": _STATE, **self.env},
            files={f"{home}/config.toml": config, f"{_STATE}/README": "State of Codex.\n"},
        )


class CodexFactory(InstalledAgentFactory):
    """Makes agents that are Codex."""

    @validate_call
    def __init__(
        self,
        *,
        model_name: str | None = None,
        subagents: bool = False,
        idle_timeout_ms: Annotated[int, Field(gt=0)] = LONGEST_WAIT_MS,
        extra_args: list[str] | None = None,
        env: dict[str, str] | None = None,
        port: Annotated[int, Field(gt=0, lt=65000)] = FORWARDED_PORT,
        keepalive_sec: Annotated[float, Field(gt=0)] = KEEPALIVE_SEC,
        forward_sampling: bool = False,
    ) -> None:
        """Validates the options.

        Args:
            model_name: The name of the model that it is told to ask for; any name works. It chooses its prompts and
                tools by the name. `None`: `policy`.
            subagents: Whether it may start agents of its own (`agents.enabled`); each is a conversation.
            idle_timeout_ms: How long it waits for an event of a response before it asks again
                (`stream_idle_timeout_ms`); keepalives are such events.
            extra_args: More arguments of `codex exec`, such as `-c key=value`.
            env: More variables of it.
            port: The port of its LLM in the container that is tried first.
            keepalive_sec: After how many seconds, each time, it is sent something while it waits for a response.
            forward_sampling: Whether its own sampling parameters are put into the requests that the policy gets.
        """
        recipe = CodexRecipe(extra_args=extra_args or (), env=env)
        recipe.subagents = subagents
        recipe.idle_timeout_ms = idle_timeout_ms
        super().__init__(recipe, EndpointOptions(model_name or POLICY, port, keepalive_sec, forward_sampling))
