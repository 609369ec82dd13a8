"""An agent's conversation with its LLM, and the compaction (shortening) of long conversations.

The option `compaction` of the bundled agents selects one of three methods:

- `none`: the conversation is never shortened.
- `drop_outputs`: each output of a command, except the most recent ones, is replaced by a line with its length.
- `summarise`: the agent asks the LLM for a summary, which replaces everything after the task. This request is a step of
  the episode, with tokens, a cost and a place in the trajectory.

The length of a conversation is the number of tokens that the inference engine reports with each response. If the engine
reports no tokens, four characters count as one token. The length depends only on messages and responses. A replayed
agent therefore shortens the conversation at the same point as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse

if TYPE_CHECKING:
    from ares_exp.agents.conversing_factory import ConversingAgentFactory


def as_plain_chat(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Converts messages for a chat without tools. Calls become text. Tool and system messages become user messages."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> Message:
    content = message.get("content") or ""
    if message.get("role") != "assistant":
        return Message(role="user", content=content)
    calls = [
        f"<tool_call>{json.dumps(dict(call.get('function', {})), ensure_ascii=False)}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    if calls and isinstance(content, str):
        content = "\n".join(([content] if content else []) + calls)
    elif calls:
        content = [*content, {"type": "text", "text": "\n".join(calls)}]
    return Message(role="assistant", content=content)


CompactionKind = Literal["none", "drop_outputs", "summarise"]

TEMPLATES = Path(__file__).parent / "context_templates"
CHARS_PER_TOKEN = 4
LEAST_MESSAGES = 4
"""Minimum number of messages after the task to summarise. A summary of fewer messages might not be shorter."""
KEPT_CHARS = 200
"""Maximum length in characters of an output that `drop_outputs` keeps, however old it is."""


class Conversation:
    """A conversation with an LLM. Use `add` to append messages, then `ask` for a response."""

    def __init__(
        self,
        llm_client: LLMClient,
        start: Sequence[Message],
        *,
        options: ConversingAgentFactory,
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        state: Callable[[], str] = str,
    ) -> None:
        """Starts the conversation.

        Args:
            llm_client: Client to send requests to.
            start: Messages that are never removed. The last message is the user message with the task.
            options: Factory of the agent, with the options and the templates for the compaction.
            system_prompt: System prompt.
            tools: Definitions of the tools that the LLM may call.
            state: Function whose return value, such as the text on the current screen, is appended to each summary. The
                value may be empty.
        """
        self._llm = llm_client
        self._task = tuple(start)
        self._start = list(start)
        self._rest: list[Message] = []
        self._options = options
        self._system_prompt = system_prompt
        self._tools = tools
        self._state = state
        self._answered_tokens = 0
        self._chars_since = 0

    def add(self, *messages: Message) -> None:
        """Appends messages to the conversation."""
        self._rest += messages
        if self._options.compaction != "none":
            self._chars_since += sum(map(_chars, messages))

    async def ask(self) -> LLMResponse:
        """Shortens the conversation if it is too long, then returns the next response. The caller has to `add` it."""
        if self._options.compaction != "none" and self._tokens() > self._options.compaction_tokens:
            if self._options.compaction == "drop_outputs" or not await self._summarise():
                self._drop_outputs()
            self._answered_tokens = 0  # the engine's count was for the previous conversation
        response = await self._llm(self._request([*self._start, *self._rest]))
        if response.usage.total_tokens:
            self._answered_tokens = response.usage.total_tokens
            self._chars_since = -len(response.text)  # the tokens of the response are already counted
        return response

    def _request(self, messages: Sequence[Message], tool_choice: str | None = None) -> LLMRequest:
        return LLMRequest(messages, system_prompt=self._system_prompt, tools=self._tools, tool_choice=tool_choice)

    def _tokens(self) -> int:
        if self._answered_tokens:
            return self._answered_tokens + max(0, self._chars_since) // CHARS_PER_TOKEN
        messages = [*self._start, *self._rest]
        return (len(self._system_prompt or "") + sum(map(_chars, messages))) // CHARS_PER_TOKEN

    async def _summarise(self) -> bool:
        """Asks the LLM for a summary, and replaces all messages after the task with it.

        Returns `False` if the response was empty. Returns `True` without a request if the conversation has fewer than
        `LEAST_MESSAGES` messages after the task.
        """
        if len(self._rest) < LEAST_MESSAGES:
            return True
        question = self._options.templates.summarise.render()
        asked = _with_user_text([*self._start, *self._rest], question)
        reply = await self._llm(self._request(asked, tool_choice=None if self._tools is None else "none"))
        summary = reply.text.strip()
        if summary:
            handoff = self._options.templates.handoff.render(summary=summary)
            self._rest = []
            self._start = _with_user_text(self._task, "\n\n".join(filter(None, (handoff, self._state()))))
        return bool(summary)

    def _drop_outputs(self) -> None:
        outputs = [place for place, message in enumerate(self._rest) if message["role"] != "assistant"]
        for place in outputs[: len(outputs) - self._options.compaction_keeps]:
            message = self._rest[place]
            if (chars := len(str(message.get("content") or ""))) > KEPT_CHARS:
                self._rest[place] = Message({**message, "content": f"[An output of {chars} characters was here.]"})


def _with_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Returns the messages with a user text at the end. If the last message is a user message, extends that message."""
    last = messages[-1]
    if last["role"] != "user" or not isinstance(last["content"], str):
        return [*messages, Message(role="user", content=text)]
    return [*messages[:-1], Message({**last, "content": f"{last['content']}\n\n{text}"})]


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list | tuple) else 0
