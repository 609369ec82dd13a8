"""The scripted policy, which returns fixed replies in order, so that episodes run without a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import validate_call
from pydantic.dataclasses import dataclass

from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Piece, TextData, ToolCallData
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.records.terminal_text import count_of

SCRIPTED_MODEL = "scripted"


@dataclass(frozen=True, config={"extra": "forbid"})
class ScriptedCall:
    """A tool call in a scripted reply.

    Attributes:
        name: Name of the tool.
        arguments: Arguments of the call. Use a string to send text that is not valid JSON, for example in a test.
    """

    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, config={"extra": "forbid"})
class ScriptedReply:
    """A scripted reply with tool calls.

    Attributes:
        tool_calls: Calls in order.
        text: Text that accompanies the calls.
    """

    tool_calls: list[ScriptedCall]
    text: str = ""

    def pieces(self, request: LLMRequest) -> list[Piece]:
        """Returns the text, if not empty, and the tool calls, whose ids are unique in the conversation of `request`."""
        calls = [
            ToolCallData(
                f"call_{len(request.messages)}_{number}",
                call.name,
                call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False),
            )
            for number, call in enumerate(self.tool_calls)
        ]
        return [*([TextData(self.text)] if self.text else []), *calls]


Reply = str | ScriptedReply


class ScriptedPolicy(Policy):
    """Returns fixed replies in order. Each episode starts with the first reply."""

    model_name = SCRIPTED_MODEL

    @validate_call
    def __init__(self, *, replies: list[Reply] | dict[str, list[Reply]], repeat_last: bool = False) -> None:
        """Validates the replies.

        Args:
            replies: Replies for all episodes, or a mapping from task names to replies. Names may be globs. An exact
                name takes precedence, then the first matching glob, then `*` (quoted in YAML, unquoted on the command
                line). A reply is a text, or contains tool calls: `{text: I look around., tool_calls: [{name: bash,
                arguments: {command: ls}}]}`.
            repeat_last: Whether to return the last reply again if the agent sends more requests than there are replies.
                If it is not set, such a request is an error.
        """
        self._replies = replies
        self._repeat_last = repeat_last
        self._without_episode: LLMClient | None = None

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client with the replies for the episode's task, starting with the first one.

        Raises:
            PolicyError: No entry matches the task.
        """
        return _Script(episode.task_name, self._replies_for(episode.task_name), self._repeat_last)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Returns the next reply, without an episode. Uses the entry `*` of a mapping, because the task is unknown."""
        self._without_episode = self._without_episode or self.for_episode(EpisodeSpec("*"))
        return await self._without_episode(request)

    def _replies_for(self, task_name: str) -> Sequence[Reply]:
        if not isinstance(self._replies, Mapping):
            return self._replies
        globs = sorted(self._replies, key=lambda pattern: pattern == "*")
        for pattern in (task_name, *(glob for glob in globs if fnmatchcase(task_name, glob))):
            if pattern in self._replies:
                return self._replies[pattern]
        entries = ", ".join(self._replies) or "none"
        raise PolicyError(
            f"policy.replies has no replies for task {task_name!r}, only for: {entries}. "
            "Add an entry for the task, or one for '*'."
        )


@dataclasses.dataclass
class _Script:
    _task_name: str
    _replies: Sequence[Reply]
    _repeat_last: bool
    _position: int = 0

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        position, count = self._position, len(self._replies)
        if position >= count and not (self._repeat_last and count):
            replies = count_of(count, "reply", "replies")
            raise PolicyError(
                f"The script for task {self._task_name!r} has {replies}, but the agent requests another one "
                f"(request {position + 1}). Add replies, or repeat the last one with policy.repeat_last=true."
            )
        self._position += 1
        reply = self._replies[min(position, count - 1)]
        if isinstance(reply, str):
            return LLMResponse.from_text(reply, model=SCRIPTED_MODEL, finish_reason="stop")
        return LLMResponse(reply.pieces(request), model=SCRIPTED_MODEL, finish_reason="tool_calls")

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        self._position += response is not None
