"""The start of a third-party agent's program: its command, environment variables, files and MCP servers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ares_exp.errors import AgentError
from ares_exp.tasks.task_contract import AgentContext
from ares_exp.tasks.task_toml import McpServer

AGENT_DIR = "/logs/agent"
"""Directory in the container for session files, saved as `files/<episode>/agent/`. The agent's user can write to it."""
MCP_FILE = f"{AGENT_DIR}/mcp.json"
"""Path of the file with the task's MCP servers, in the format of `mcp_json`."""
NO_SKILLS = f"{AGENT_DIR}/skills"
"""Empty directory that agents get as the directory of skills if a task has no skills."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Values for the command of one episode, which an agent's factory receives. All paths are container paths.

    Attributes:
        url: URL of the LLM, such as `http://127.0.0.1:61081`, without `/v1` and without a trailing slash.
        key: API key to send with each request.
        model: Model name to send in requests.
        instruction_file: Path of the file with the task's instruction.
        program: Return value of `InstalledAgentFactory.find_program`.
        context: Skills, MCP servers and earlier messages of the task.
    """

    url: str
    key: str
    model: str
    instruction_file: str
    program: str = ""
    context: AgentContext = field(default_factory=AgentContext)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the command of every agent gets. Its factory may add more variables."""
        return {
            "ARES_LLM_URL": self.url,
            "ARES_LLM_KEY": self.key,
            "ARES_MODEL": self.model,
            "ARES_INSTRUCTION_FILE": self.instruction_file,
            "ARES_AGENT_DIR": AGENT_DIR,
            "ARES_MCP_FILE": MCP_FILE,
            "ARES_SKILLS": self.context.skills_dir or NO_SKILLS,
        }

    def copy_skills(self, target: str) -> str:
        """Returns shell source that copies the task's skills to `target`. Empty if the task has no skills."""
        if self.context.skills_dir is None:
            return ""
        source, folder = shlex.quote(self.context.skills_dir), shlex.quote(target)
        return f"if [ -d {source} ]; then mkdir -p {folder} && cp -r {source}/. {folder}; fi\n"


@dataclass(frozen=True, slots=True)
class AgentFile:
    """A text file to create in the container before the agent's program starts.

    Attributes:
        text: Contents of the file.
        mode: Octal mode; `None` for the default mode of new files.
        is_secret: Whether the text contains the API key. If so, the text is never written to a disk of this machine.
    """

    text: str
    mode: str | None = None
    is_secret: bool = False


@dataclass(frozen=True, slots=True)
class LaunchedCommand:
    """The command that starts the agent.

    Attributes:
        command: Shell source, run as the agent's user in the container's working directory. Its standard input is the
            instruction, and its environment includes `Launch.variables`.
        env: Additional environment variables. Put the API key here, not into `command`, which is recorded.
        files: Text files to create before the start: path → file. They belong to the agent's user. A path is absolute
            or starts with `~/`.
    """

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, AgentFile] = field(default_factory=dict)


def mcp_json(servers: Sequence[McpServer]) -> str:
    """Returns MCP servers in the JSON format that most agents read: `{"mcpServers": {NAME: …}}`.

    Raises:
        AgentError: The headers of a server refer to variables of the host.
    """
    return json.dumps({"mcpServers": {server.name: mcp_entry(server) for server in servers}}, indent=1)


def mcp_entry(server: McpServer) -> dict[str, Any]:
    """Returns the JSON object that describes one MCP server in the format of `mcp_json`.

    Raises:
        AgentError: The headers of the server refer to variables of the host.
    """
    if any("${" in value for value in server.headers.values()):
        raise AgentError(
            f"The MCP server {server.name!r} of the task has headers with variables of this machine, which third-party "
            "agents do not receive, because they could print them. Leave the task out with env.exclude=[TASK]."
        )
    if server.transport == "stdio":
        return {"type": "stdio", "command": server.command, "args": list(server.args)}
    kind = "sse" if server.transport == "sse" else "http"
    return {"type": kind, "url": server.url, "headers": server.headers}
