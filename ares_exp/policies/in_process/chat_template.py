"""Conversion of requests to prompts of token ids, and of responses to text and tool calls, with a chat template.

A prompt is either rendered completely, or *continues* an earlier prompt of the conversation. A continued prompt
consists of the earlier prompt, the response as it was sampled, and the text that the template adds after that response.
It therefore starts with exactly the ids of the previous prompt and response, even if the template would render the
response differently. Reasoning also remains, although some templates remove it from earlier turns.

The text of a response is parsed into reasoning, text and tool calls. The format of tool calls belongs to one of four
families, which markers in the template identify. A call that cannot be parsed remains text, so that the agent sees it.

| family | format of a tool call |
|---|---|
| `hermes` (Hermes, Qwen 2.5, Qwen 3) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| `qwen_coder` (Qwen 3 Coder) | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>` |
| `mistral` | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` |
| `llama` (Llama 3.1 and later) | the whole text is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>` |
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ares_exp.cancellation import in_thread
from ares_exp.errors import PreflightError, UnsendableRequestError
from ares_exp.llms.canonical import Canonical, canonical
from ares_exp.llms.chat_messages import arguments_object, assistant_message, text_of
from ares_exp.llms.request import REASONING_FIELDS, LLMRequest
from ares_exp.llms.response import LLMResponse, Piece, TextData, ThinkingData, ToolCallData
from ares_exp.llms.wire import plain

_MARK = "\u2063ares-exp-mark\u2063"
"""Placeholder for the text of a response. It shows where the template puts the response."""

MAX_TURNS = 64
"""Maximum number of turns that are stored for an episode. Older turns are dropped."""

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?\[ARGS\]\s*", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"

Found = tuple[str, list[ToolCallData]]
"""Result of parsing a text: the text without its tool calls, and the tool calls, whose ids are still empty."""


class ChatTemplate:
    """The chat template of a tokenizer of the library transformers. It converts requests to token ids."""

    def __init__(self, tokenizer: Any) -> None:
        """Stores the tokenizer, which must have a chat template."""
        self.tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers do not support concurrent calls

    def prompt(self, request: LLMRequest) -> list[int]:
        """Returns the token ids of a request. The template renders all of its messages.

        Raises:
            UnsendableRequestError: The template cannot represent the request.
        """
        return self._ids(self._render(messages_of(request), request, starts_response=True))

    def continued(self, turn: Turn, request: LLMRequest) -> list[int] | None:
        """Returns the token ids of a request that continues a turn: the ids of the turn, then the ids of new messages.

        Returns `None` if it is not clear which text the template adds after the response.

        Raises:
            UnsendableRequestError: The template cannot represent the request.
        """
        messages = messages_of(request)
        place = turn.num_messages
        marked = [*messages[:place], {**messages[place], "content": _MARK}]
        for name in REASONING_FIELDS:
            marked[-1].pop(name, None)
        asked = _after_mark(self._render([*marked, *messages[place + 1 :]], request, starts_response=True))
        answered = _after_mark(self._render(marked, request))
        bare = _after_mark(self._render([*marked[:-1], {"role": "assistant", "content": _MARK}], request))
        if asked is None or answered is None or bare is None or not asked.startswith(answered):
            return None
        if not answered.endswith(bare):
            return None
        added = self._ids(bare + asked[len(answered) :])
        is_end_sampled = bool(added) and turn.ids[-1:] == added[:1]
        return [*turn.ids, *(added[1:] if is_end_sampled else added)]

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids of tokens that end a response: the end-of-sequence token and the special token that the template adds."""
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        after = _after_mark(self._render(conversation, LLMRequest([])))
        first = [*(self._ids(after) if after else []), None][0]
        token = self.tokenizer.added_tokens_decoder.get(first)
        own = first if token is not None and token.special else None
        return frozenset(one for one in (own, self.tokenizer.eos_token_id) if one is not None)

    def without_special(self, text: str) -> str:
        """Returns a text without special tokens of the tokenizer, such as `<|im_end|>`."""
        for token in self.tokenizer.added_tokens_decoder.values():
            if token.special:
                text = text.replace(token.content, "")
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _render(self, messages: list[dict[str, Any]], request: LLMRequest, *, starts_response: bool = False) -> str:
        tools = None if request.tool_choice == "none" else plain(request.tools) or None
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=starts_response
                )
            )
        except Exception as error:  # an error of jinja2, or of the template's operations on messages
            raise UnsendableRequestError(
                f"The chat template of the model rejects the request: {type(error).__name__}: {error}"
            ) from None

    def _ids(self, text: str) -> list[int]:
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class ChatTemplates:
    """The chat templates of models. Each template is loaded only once, even if several episodes need it at once."""

    def __init__(self) -> None:
        self._loading = asyncio.Lock()  # the first import of transformers in several threads fails at random
        self._loaded: dict[tuple[str, Path | None, bool], ChatTemplate] = {}

    async def of(self, name: str, chat_template: Path | None = None, trust_remote_code: bool = False) -> ChatTemplate:
        """Returns the chat template of a tokenizer. `load_tokenizer` describes the arguments and the errors."""
        key = (name, chat_template, trust_remote_code)
        async with self._loading:
            if key not in self._loaded:
                tokenizer = await in_thread(
                    lambda: load_tokenizer(name, chat_template=chat_template, trust_remote_code=trust_remote_code)
                )
                self._loaded[key] = ChatTemplate(tokenizer)
        return self._loaded[key]


def _after_mark(text: str) -> str | None:
    _, mark, after = text.rpartition(_MARK)
    return after if mark else None


def load_tokenizer(name: str, *, chat_template: Path | None, trust_remote_code: bool) -> Any:
    """Loads a tokenizer with a chat template.

    Args:
        name: Directory of a saved tokenizer, or its name on the hub.
        chat_template: File with a template that replaces the tokenizer's template.
        trust_remote_code: Whether code from the tokenizer's files may run.

    Raises:
        PreflightError: The tokenizer cannot be loaded, or has no chat template. The message suggests a fix.
    """
    if find_spec("torch") is None:  # not needed, but transformers would print a warning
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise PreflightError("The tokenizer of a model needs transformers: pip install transformers.") from None
    try:
        made = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise PreflightError(
            f"Cannot load a tokenizer from {name}. Use the directory of a saved tokenizer, or its name on "
            f"the hub: {error}"
        ) from None
    return with_template(made, name, chat_template)


def with_template(tokenizer: Any, name: str | None, chat_template: Path | None) -> Any:
    """Replaces the tokenizer's template by the file `chat_template`, if it is set. Returns the tokenizer.

    Raises:
        PreflightError: The tokenizer has no chat template, or the file cannot be read.
    """
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PreflightError(f"policy.chat_template={chat_template} cannot be read: {error}") from None
    if tokenizer.chat_template is None:
        raise PreflightError(
            f"The tokenizer of {name} has no chat template, so it cannot format requests. Use the "
            "instruction-tuned model, or set a file with policy.chat_template=…"
        )
    return tokenizer


def prompt_of(
    template: ChatTemplate, request: LLMRequest, conversations: Conversations, warn: Callable[[str], None]
) -> list[int]:
    """Returns the token ids of a request: the ids of the turn that it continues, followed by its new messages.

    If the request continues no turn, or the template does not allow it, renders the complete request.

    Raises:
        UnsendableRequestError: The template cannot represent the request.
    """
    turn = conversations.of(request)
    if turn is None:
        return template.prompt(request)
    if (continued := template.continued(turn, request)) is not None:
        return continued
    warn(
        "The chat template of the model cannot append messages to a response, so each prompt is rendered again as a "
        "whole. If this changes earlier token ids, the conversation is split into several training rows."
    )
    return template.prompt(request)


def response_pieces(
    template: ChatTemplate, request: LLMRequest, *, prompt: Sequence[int], text: str, call_id: str
) -> list[Piece]:
    """Parses the `text` of a response to `prompt` into pieces without special tokens. Call ids start with `call_id`."""
    pieces = pieces_of(
        text,
        str(template.tokenizer.chat_template),
        None if request.tool_choice == "none" else request.tools,
        call_id=call_id,
        starts_thinking=template.decode(prompt[-8:]).rstrip().endswith("<think>"),
    )
    return [TextData(template.without_special(one.content)) if isinstance(one, TextData) else one for one in pieces]


def messages_of(request: LLMRequest) -> list[dict[str, Any]]:
    """Converts the messages of a request to the format that chat templates expect.

    Contents are strings, and the arguments of tool calls are objects instead of JSON texts.

    Raises:
        UnsendableRequestError: A message contains anything except text.
    """
    system = [] if not request.system_prompt else [{"role": "system", "content": request.system_prompt}]
    return [*system, *(_message(plain(message)) for message in request.messages)]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    kinds = {part.get("type") for part in content if isinstance(part, Mapping)} if isinstance(content, list) else set()
    if others := kinds - {"text", None}:
        raise UnsendableRequestError(
            f"The policy supports only text, got a message with {', '.join(sorted(map(str, others)))}."
        )
    made = {**message, "content": text_of(content)}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a tool call's arguments if they are a JSON object, because most templates convert objects to JSON."""
    function = call.get("function") or {}
    given = function.get("arguments")
    arguments = arguments_object(given) if isinstance(given, str) else given
    return {**call, "function": {**function, "arguments": given if arguments is None else arguments}}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and its response, as token ids.

    Attributes:
        ids: Token ids of the prompt and of the sampled response.
        num_messages: Number of messages of the request, including the system prompt.
        digests: Digest of each message, including the response. They show whether a request continues the turn.
    """

    ids: Sequence[int]
    num_messages: int
    digests: Canonical


@dataclass(slots=True)
class Conversations:
    """The most recent turns of one episode. The method `of` finds the turn that a request continues."""

    turns: list[Turn] = field(default_factory=list)

    def add(self, request: LLMRequest, response: LLMResponse) -> None:
        """Adds a turn. Ignores a response without token ids."""
        if response.prompt_token_ids is None or response.completion_token_ids is None:
            return
        whole = canonical(replace(request, messages=[*request.messages, assistant_message(response.data)]))
        ids = [*response.prompt_token_ids, *response.completion_token_ids]
        self.turns.append(Turn(ids, len(whole.messages) - 1, whole))
        del self.turns[:-MAX_TURNS]

    def of(self, request: LLMRequest) -> Turn | None:
        """Returns the longest turn that is a prefix of the request's messages; `None` if there is no such turn."""
        asked = canonical(request)
        fitting = [
            turn
            for turn in self.turns
            if asked.settings == turn.digests.settings
            and len(asked.messages) > len(turn.digests.messages)
            and asked.continues(turn.digests)
        ]
        return max(fitting, key=lambda turn: (turn.num_messages, len(turn.ids)), default=None)


def digest_of(ids: Sequence[int]) -> str:
    """Returns a short hash of token ids, in hexadecimal."""
    return blake2b(json.dumps(list(ids)).encode(), digest_size=12).hexdigest()


def pieces_of(
    text: str, template: str, tools: Sequence[Mapping[str, Any]] | None, *, call_id: str, starts_thinking: bool
) -> list[Piece]:
    """Parses the text of a response into pieces: reasoning, text and tool calls.

    Args:
        text: Generated text without the token that ended it.
        template: Source of the chat template.
        tools: Tools that the request offers. If it offers no tools, the text of tool calls remains text.
        call_id: Prefix of the ids of tool calls.
        starts_thinking: Whether the prompt ends with an open reasoning block, so that the text starts with reasoning.
    """
    thinking, said = _thinking(text, template, starts_thinking)
    left, calls = said, list[ToolCallData]()
    find = next((read for mark, read in _FAMILIES if mark in template), None)
    if tools and find is not None:
        left, calls = find(said, tools)
    pieces: list[Piece] = [ThinkingData(thinking)] if thinking.strip() else []
    if left.strip() or not (calls or pieces):
        pieces.append(TextData(left.strip() if calls else left))
    return pieces + [replace(one, id=f"{call_id}_{number}") for number, one in enumerate(calls)]


def _thinking(text: str, template: str, starts_thinking: bool) -> tuple[str, str]:
    """Returns the reasoning and the rest of the text. An unclosed reasoning block extends to the end of the text."""
    if "</think>" not in template:
        return "", text
    stripped = text.lstrip()
    if stripped.startswith("<think>"):
        inside = stripped.removeprefix("<think>")
    elif starts_thinking:
        inside = text
    else:
        return "", text
    thought, _, said = inside.partition("</think>")
    return thought.strip("\n"), said.lstrip("\n")


def _hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    return _in_blocks(text, lambda block: _json_calls(block, "arguments"))


def _qwen_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    def read(block: str) -> list[ToolCallData]:
        found = _FUNCTION.fullmatch(block)
        if found is None:
            return []
        kinds = _kinds(found[1], tools)
        arguments = {name: _typed(value, kinds.get(name)) for name, value in _PARAMETER.findall(found[2])}
        return [ToolCallData("", found[1], json.dumps(arguments, ensure_ascii=False))]

    return _in_blocks(text, read)


def _mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    before, mark, after = text.partition(_MISTRAL)
    if not mark:
        return text, []
    calls: list[ToolCallData] = []
    for part in after.split(_MISTRAL):
        named = _NAMED.match(part)
        found = _one(named[1], part[named.end() :]) if named else _json_calls(part, "arguments")
        if not found:
            return text, []
        calls += found
    return before, calls


def _llama(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    found = _json_calls(text.strip().removeprefix(_PYTHON_TAG), "parameters")
    return ("", found) if found else (text, [])


_FAMILIES: Sequence[tuple[str, Callable[[str, Sequence[Mapping[str, Any]]], Found]]] = (
    ("<function=", _qwen_coder),
    ("<tool_call>", _hermes),
    (_MISTRAL, _mistral),
    (_PYTHON_TAG, _llama),
    ('"parameters": ', _llama),
)
"""The marker of each family in chat templates, and the function that finds its tool calls. The first marker counts."""


def _in_blocks(text: str, read: Callable[[str], list[ToolCallData]]) -> Found:
    calls: list[ToolCallData] = []

    def take(block: re.Match[str]) -> str:
        found = read(block[1])
        calls.extend(found)
        return "" if found else block[0]

    left = _BLOCK.sub(take, text)
    return left, calls


def _json_calls(text: str, arguments_field: str) -> list[ToolCallData]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = value if isinstance(value, list) else [value]
    calls = [_json_call(entry, arguments_field) for entry in entries]
    return [call for call in calls if call is not None] if all(calls) else []


def _json_call(entry: Any, arguments_field: str) -> ToolCallData | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get(arguments_field, entry.get("arguments", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCallData("", entry["name"], text)


def _one(name: str, arguments: str) -> list[ToolCallData]:
    try:
        return [ToolCallData("", name, json.dumps(json.loads(arguments), ensure_ascii=False))]
    except (ValueError, RecursionError):
        return []


def _kinds(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: one.get("type") for key, one in properties.items() if isinstance(one, Mapping)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Parses a parameter as JSON, unless its schema has the type string. A value that is not JSON remains a text."""
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
