"""`agent=opencode`: unmodified opencode."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ares_exp.agents.installed.installed_agent import (
    AGENT_DIR,
    Launch,
    LaunchedCommand,
    PackagedAgentFactory,
    mcp_entry,
)
from ares_exp.agents.toolbox.placing import Placed

_SWITCHED_OFF = (
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS",
    "OPENCODE_DISABLE_SHARE",
)
_OF_THE_PROVIDER = ("webfetch", "websearch")


class OpencodeFactory(PackagedAgentFactory):
    """Creates opencode agents, which start `opencode run`."""

    name = "opencode"
    conversation_headers = ("x-session-id",)
    variables = ("provider.ares.options.baseURL in OPENCODE_CONFIG_CONTENT",)
    supports = frozenset({"mcp_servers", "skills_dir"})

    def program(self, placed: Placed) -> str:
        """Returns the path of the executable."""
        return placed.path("bin", "opencode")

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode. The instruction is passed via stdin."""
        arguments = ["run", "--format=json", "--dangerously-skip-permissions", *self.extra_args]
        home = f"{AGENT_DIR}/opencode"
        env = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(self._config(launch)),
            "OPENCODE_FAKE_VCS": "git",
            **dict.fromkeys(_SWITCHED_OFF, "1"),
            **{name: f"{home}/{name.split('_')[1].lower()}" for name in _XDG},
            **self.env,
        }
        skills = launch.copy_skills(f"{home}/config/opencode/skills")
        return LaunchedCommand(f"{skills}{launch.program} {shlex.join(arguments)}", env=env)

    def _config(self, launch: Launch) -> dict[str, object]:
        refused = (*_OF_THE_PROVIDER, *(() if self.subagents else ("task",)))
        limit = {"context": 1_000_000, "output": 32_000}
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # included in opencode
            "name": "ares",
            "options": {"baseURL": f"{launch.url}/v1", "apiKey": "{env:ARES_LLM_KEY}", "timeout": False},
            "models": {launch.model: {"name": launch.model, "limit": limit}},
        }
        return {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "model": f"ares/{launch.model}",
            "small_model": f"ares/{launch.model}",
            "agent": {"title": {"disable": True}},
            "tools": dict.fromkeys(refused, False),
            "provider": {"ares": provider},
            "mcp": {server.name: _mcp(mcp_entry(server)) for server in launch.context.mcp_servers},
        }


def _mcp(entry: Mapping[str, Any]) -> dict[str, object]:
    if "command" in entry:
        return {"type": "local", "command": [entry["command"], *entry["args"]]}
    return {"type": "remote", "url": entry["url"], "headers": entry["headers"], "oauth": False}


_XDG = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
