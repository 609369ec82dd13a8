"""`agent=codex`: Codex, OpenAI's agent, unmodified."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.installed.installed_agent import (
    AGENT_DIR,
    LONGEST_WAIT_MS,
    AgentFile,
    Launch,
    LaunchedCommand,
    PackagedAgentFactory,
    mcp_entry,
)
from ares_exp.agents.interception.line import KEEPALIVE_SEC
from ares_exp.agents.toolbox.package import GNU_MACHINES
from ares_exp.agents.toolbox.placing import Placed
from ares_exp.containers.forwarded_port import FORWARDED_PORT
from ares_exp.errors import AgentError
from ares_exp.tasks.task_toml import McpServer

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
multi_agent_v2 = {subagents}  # names subagents by their tasks, not by random ids

[agents]
enabled = {subagents}

[skills.bundled]  # they fetch from the network, and generate images
enabled = false
"""
_STATE = "/tmp/ares_exp-codex"
"""Directory in the container for Codex's databases. They are not saved, because they are unused after the episode."""


class CodexFactory(PackagedAgentFactory):
    """Creates Codex agents, which start `codex exec`."""

    name = "codex"
    variables = ("model_providers.ares.base_url in $CODEX_HOME/config.toml",)
    normalisers: Mapping[str, tuple[str, str]] = {
        "codex_chunks": (r"Chunk ID: [0-9a-f]+", "Chunk ID: <id>"),
        "codex_wall_times": (r"Wall time: [0-9.]+ seconds", "Wall time: <time>"),
    }
    supports = frozenset({"mcp_servers", "skills_dir"})

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
            model_name: Model name that Codex sends in its requests. Any name works, but Codex selects its prompts and
                tools by the name. With `None`, the name is `policy`.
            subagents: Whether Codex may start subagents (`agents.enabled`). Each subagent has its own conversation.
            idle_timeout_ms: Number of milliseconds that Codex waits for an event in a response before it repeats the
                request (`stream_idle_timeout_ms`). Keepalives count as events.
            extra_args: Additional arguments of `codex exec`, such as `-c key=value`.
            env: Additional environment variables of Codex.
            port: Port on the container's loopback for requests to the LLM. If it is in use, the next ports are tried.
            keepalive_sec: Interval in seconds between keepalives while Codex waits for a response.
            forward_sampling: Whether the requests to the policy include the agent's own sampling parameters.
        """
        super().__init__(
            model_name=model_name,
            subagents=subagents,
            extra_args=extra_args,
            env=env,
            port=port,
            keepalive_sec=keepalive_sec,
            forward_sampling=forward_sampling,
        )
        self.idle_timeout_ms = idle_timeout_ms
        # By the id of its thread, requests of subagents are recognised. Without subagents, Codex has only one thread.
        self.conversation_headers = ("thread-id",) if subagents else ()

    def program(self, placed: Placed) -> str:
        """Returns the path of the executable, whose folder is named after the platform."""
        machine = GNU_MACHINES[placed.build.machine]
        return placed.path("vendor", f"{machine}-unknown-linux-musl", "bin", "codex")

    def command(self, launch: Launch) -> LaunchedCommand:
        """Returns the command of one episode with its configuration. The instruction is passed via stdin."""
        home = f"{AGENT_DIR}/codex"
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
        config += "".join(_mcp_table(server) for server in launch.context.mcp_servers)
        skills = launch.copy_skills(f"{home}/skills")
        return LaunchedCommand(
            f'{skills}{launch.program} {shlex.join(arguments)}; code=$?; rm -rf "$CODEX_HOME/tmp"; exit $code',
            env={"CODEX_HOME": home, "CODEX_SQLITE_HOME": _STATE, **self.env},
            files={
                f"{home}/config.toml": AgentFile(config),
                f"{_STATE}/README": AgentFile("State of Codex.\n"),
            },
        )


def _mcp_table(server: McpServer) -> str:
    """Returns the TOML table of an MCP server for `config.toml`. Raises `AgentError` for the transport `sse`."""
    if server.transport == "sse":
        raise AgentError(
            f"The MCP server {server.name!r} of the task uses the transport sse, which Codex does not support. "
            "Choose another agent, such as agent=claude_code."
        )
    entry = mcp_entry(server)
    lines = [f"{key} = {_toml(entry[key])}" for key in ("command", "args", "url") if key in entry]
    headers = "".join(f"\n{_toml(name)} = {_toml(value)}" for name, value in server.headers.items())
    table = f"mcp_servers.{_toml(server.name)}"
    return "\n".join(["", f"[{table}]", *lines, ""]) + (f"[{table}.http_headers]{headers}\n" if headers else "")


def _toml(value: object) -> str:
    """Formats a string or a list of strings as TOML, which uses the same escapes as JSON."""
    return json.dumps(value, ensure_ascii=False)
