"""`AgentContext`: the parts of a task, besides the instruction, that an agent gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ares_exp.tasks.mcp_server import McpServer


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Parts of a task that its agent gets besides the instruction. The factory of an agent that supports them says so.

    Such a factory has `supports: frozenset[str]` with some of the names below, and its agents have
    `set_context(context)`, called before `run`. A task that needs what the agent does not support is refused.

    Attributes:
        messages: `"messages"`: a conversation that the agent continues, oldest first.
        skills_dir: `"skills_dir"`: a directory of skills in the container.
        mcp_servers: `"mcp_servers"`: tool servers.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    skills_dir: str | None = None
    mcp_servers: tuple[McpServer, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        """Names of what there is."""
        return frozenset(name for name in ("messages", "skills_dir", "mcp_servers") if getattr(self, name))
