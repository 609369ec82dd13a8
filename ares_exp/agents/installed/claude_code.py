"""`agent=claude_code`: Claude Code, Anthropic's agent, unmodified."""

from __future__ import annotations

import shlex
import uuid

from ares_exp.agents.installed.installed_agent import (
    AGENT_DIR,
    LONGEST_WAIT_MS,
    MCP_FILE,
    Launch,
    LaunchedCommand,
    PackagedAgentFactory,
)
from ares_exp.agents.toolbox.placing import Placed

_SESSION = str(uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/ares-exp/ares_exp"))
"""Session id of Claude Code in every episode. A random id would make the requests of each run differ."""
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
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",  # telemetry, error reports, updates, background requests
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",  # they defer tools, which changes the format of requests
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK",  # the fallback would repeat the request without streaming
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE",
    "CLAUDE_CODE_DISABLE_CRON",
)


class ClaudeCodeFactory(PackagedAgentFactory):
    """Creates Claude Code agents, which start Claude Code in its print mode."""

    name = "claude_code"
    conversation_headers = ("x-claude-code-agent-id",)
    variables = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
    supports = frozenset({"mcp_servers", "skills_dir"})

    def program(self, placed: Placed) -> str:
        """Returns the path of the executable."""
        return placed.path("claude")

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode. The instruction is passed via stdin."""
        refused = (*_OF_THE_PROVIDER, *(() if self.subagents else _SUBAGENTS))
        arguments = [
            *("--print", "--verbose", "--output-format=stream-json", "--permission-mode=bypassPermissions"),
            *("--session-id", _SESSION, "--disallowedTools", ",".join(refused)),
            *(("--mcp-config", MCP_FILE) if launch.context.mcp_servers else ()),
            *self.extra_args,
        ]
        home = f"{AGENT_DIR}/claude"
        env = {
            "ANTHROPIC_BASE_URL": launch.url,
            "ANTHROPIC_API_KEY": launch.key,
            **dict.fromkeys(_MODELS, launch.model),
            **dict.fromkeys(_SWITCHED_OFF, "1"),
            "IS_SANDBOX": "1",  # required to bypass permissions as root
            "MCP_CONNECTION_NONBLOCKING": "false",
            "API_TIMEOUT_MS": str(LONGEST_WAIT_MS),
            "CLAUDE_CONFIG_DIR": home,
            **self.env,
        }
        skills = launch.copy_skills(f"{home}/skills")
        return LaunchedCommand(f"{skills}{launch.program} {shlex.join(arguments)}", env=env)
