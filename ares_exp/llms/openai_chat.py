"""Converters to and from the chat-completions wire format, as documented by OpenAI and used by other engines.

Format: https://platform.openai.com/docs/api-reference/chat. Bodies are JSON-ready dicts. No content is lost silently.
Unsupported content raises a `WireFormatError` that names the content. With `strict=False`, it is dropped with a
`UserWarning`, or the callback `report` gets the text of the warning. Unknown fields with an empty value (`null`, `[]`,
`{}`, `""`) are ignored.

| in this package | in the chat-completions format |
|---|---|
| `system_prompt` | a first message of role system with plain text; other system messages stay messages |
| `max_output_tokens` | `max_completion_tokens`, or the older `max_tokens` (`max_tokens_field`); both are read |
| `stop_sequences` | `stop` |
| `top_k` | not supported by OpenAI: rejected when writing, read if an agent sends it |
| the requested model | not part of an `LLMRequest`: an argument when writing, `body["model"]` when reading |
| a refusal | text, with `finish_reason="refusal"`, so that the agent sees it |
| `prompt_token_ids`, `completion_token_ids` | vLLM's `prompt_token_ids` and `choices[0].token_ids` |
| `logprobs` | `choices[0].logprobs.content[].logprob`; token strings are not kept |
| reasoning (`ThinkingData`) | `reasoning_content`, `reasoning`, `reasoning_details` (see `chat_messages`) |
| `usage.cached_tokens`, `cache_write_tokens` | `usage.prompt_tokens_details`, by the same names |
| `usage.reasoning_tokens` | `usage.completion_tokens_details.reasoning_tokens`. If the total shows that a server does \
not include them in the completion tokens, they are added |
| `cost` | `usage.cost`, OpenRouter's extension |
| `latency_sec`, `sampling`, `policy_version`, `policy_version_from`, `activations` | the same names, our extensions |

Token ids, log-probabilities, the cost and our extensions are read from responses, but not written.

Fields of a response that only describe the call are dropped: `id`, `object`, `created`, `system_fingerprint`,
`service_tier`, and the other details in `usage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ares_exp.errors import MalformedResponseError, UnsendableRequestError
from ares_exp.llms.chat_messages import (
    call_part,
    calls_of,
    reasoning_of_message,
    reasoning_of_part,
    reasoning_to_message,
)
from ares_exp.llms.request import REASONING_FIELDS, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.llms.wire import (
    MAX_COUNT,
    NUMBER,
    Report,
    ResponseStream,
    WireFormatError,
    check_keys,
    errors_as,
    list_of,
    on_loss,
    optional,
    plain,
    required,
    shorten,
    typed,
)

MaxTokensField = Literal["max_completion_tokens", "max_tokens"]

_SAME_NAME: dict[str, tuple[type, ...]] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "tools": (list,),
    "tool_choice": (str, Mapping),
    "metadata": (Mapping,),
    "service_tier": (str,),
}
_REQUEST_KEYS = {*_SAME_NAME, "model", "messages", "max_completion_tokens", "max_tokens", "stop", "stream", "top_k"}
_OWN_KEYS = {"latency_sec", "sampling", "policy_version", "policy_version_from", "activations"}
_RESPONSE_KEYS = {"choices", "model", "usage", "prompt_token_ids", *_OWN_KEYS}
_ENVELOPE_KEYS = {"id", "object", "created", "system_fingerprint", "service_tier"}
_CHOICE_KEYS = {"index", "message", "finish_reason", "logprobs", "token_ids"}
_MESSAGE_KEYS = {"role", "content", "refusal", "tool_calls", *REASONING_FIELDS}


def request_to_body(
    request: LLMRequest,
    *,
    model: str,
    max_tokens_field: MaxTokensField = "max_completion_tokens",
    strict: bool = True,
    report: Report | None = None,
) -> dict[str, Any]:
    """Converts `request` to a chat-completions body for `model`.

    Raises:
        UnsendableRequestError: `request` has unsupported content, and `strict` is set.
    """
    lose = on_loss(strict, report, UnsendableRequestError)
    system = [] if request.system_prompt is None else [{"role": "system", "content": request.system_prompt}]
    body: dict[str, Any] = {"model": model, "messages": system + plain(request.messages)}
    body |= {key: plain(getattr(request, key)) for key in _SAME_NAME if getattr(request, key) is not None}
    if request.max_output_tokens is not None:
        body[max_tokens_field] = request.max_output_tokens
    if request.stop_sequences is not None:
        body["stop"] = list(request.stop_sequences)
    if request.stream:
        body["stream"] = True
    if request.top_k is not None:
        lose("`top_k`, which Chat Completions does not have (if the engine supports it, use `extra_body`)")
    if "metadata" in body:
        for key, value in body["metadata"].items():
            if not isinstance(value, str):
                lose(f"`metadata.{key}` of type {type(value).__name__} (metadata on the wire is text)")
        body["metadata"] = {key: value for key, value in body["metadata"].items() if isinstance(value, str)}
    return body


def request_from_body(body: Mapping[str, Any], *, strict: bool = True, report: Report | None = None) -> LLMRequest:
    """Converts a chat-completions body to an `LLMRequest`, without the model, which callers read from `body["model"]`.

    Raises:
        WireFormatError: `body` is malformed, or has a field that an `LLMRequest` cannot represent and `strict` is set.
    """
    messages = [
        typed(message, "messages[]", Mapping)
        for message in required(typed(body, "the request", Mapping), "messages", list)
    ]
    for message in messages:
        required(message, "role", str)
    first = messages[0] if messages else {}
    is_system = set(first) == {"role", "content"} and first["role"] == "system" and isinstance(first["content"], str)
    known = _REQUEST_KEYS | ({"n"} if body.get("n") == 1 else set())
    check_keys(body, known, "request", on_loss(strict, report))
    new: int | None = optional(body, "max_completion_tokens", int)
    old: int | None = optional(body, "max_tokens", int)
    if new is not None and old is not None and new != old:
        raise WireFormatError(f"Expected only one of max_completion_tokens={new} and max_tokens={old}. Remove one.")
    return LLMRequest(
        messages=messages[1:] if is_system else messages,
        system_prompt=first["content"] if is_system else None,
        max_output_tokens=old if new is None else new,
        stop_sequences=[body["stop"]] if isinstance(body.get("stop"), str) else list_of(body, "stop", str),
        stream=bool(optional(body, "stream", bool)),
        top_k=optional(body, "top_k", int),
        **{key: optional(body, key, *types) for key, types in _SAME_NAME.items()},
    )


def response_to_body(
    response: LLMResponse, *, model: str | None = None, response_id: str = "chatcmpl-0", created: int = 0
) -> dict[str, Any]:
    """Converts `response` to a chat-completions body.

    The body loses the order of the pieces, because this format has only reasoning, one text, and then tool calls. It
    has no costs, times, token ids or log-probabilities.

    Args:
        response: Response to convert.
        model: Name of the model in the body. Default: the model that responded.
        response_id: Id of the response.
        created: Time of creation in epoch seconds.
    """
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model or response.model or "",
        "choices": [{"index": 0, "message": _message_to_wire(response), "finish_reason": _finish_reason(response)}],
        "usage": usage_to_wire(response.usage),
    }


def usage_to_wire(usage: Usage) -> dict[str, Any]:
    """Converts token counts to the API's `usage`, including the details that some clients require."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def response_from_body(body: Any, *, strict: bool = True, report: Report | None = None) -> LLMResponse:
    """Converts a parsed chat-completions body to a response.

    Raises:
        MalformedResponseError: `body` is not a chat completion, or has a field that an `LLMResponse` cannot represent
            and `strict` is set.
    """
    lose = on_loss(strict, report)
    with errors_as(MalformedResponseError):
        choices = required(typed(body, "the response", Mapping), "choices", list)
        if not choices:
            raise WireFormatError(f"Expected at least one choice in the response, got none: {shorten(body)}")
        if len(choices) > 1:
            lose(f"all but the first of {len(choices)} choices")
        choice = typed(choices[0], "choices[0]", Mapping)
        message = required(choice, "message", Mapping)
        check_keys(body, _RESPONSE_KEYS | _ENVELOPE_KEYS, "response", lose)
        check_keys(choice, _CHOICE_KEYS, "response's choice", lose)
        check_keys(message, _MESSAGE_KEYS, "response's message", lose)
        refusal = optional(message, "refusal", str)
        texts = _texts(message, lose) + ([TextData(refusal)] if refusal else [])
        usage = optional(body, "usage", Mapping) or {}
        return LLMResponse(
            data=[*reasoning_of_message(message, lose), *texts, *calls_of(message)],
            cost=float(optional(usage, "cost", *NUMBER) or 0.0),
            usage=_usage(usage),
            prompt_token_ids=list_of(body, "prompt_token_ids", int),
            completion_token_ids=list_of(choice, "token_ids", int),
            logprobs=_logprobs(choice, lose),
            finish_reason="refusal" if refusal else optional(choice, "finish_reason", str),
            model=optional(body, "model", str) or None,
            latency_sec=optional(body, "latency_sec", *NUMBER),
            sampling=optional(body, "sampling", Mapping),
            policy_version=optional(body, "policy_version", str),
            policy_version_from=optional(body, "policy_version_from", str),
            activations=optional(body, "activations", Mapping),
        )


def _message_to_wire(response: LLMResponse) -> dict[str, Any]:
    texts = [piece.content for piece in response.data if isinstance(piece, TextData)]
    calls = [call_part(one.id, one.name, one.arguments) for one in response.data if isinstance(one, ToolCallData)]
    text = "".join(texts) if texts else None
    refused = response.finish_reason == "refusal"
    message: dict[str, Any] = {"role": "assistant", "content": None if refused else text}
    message |= reasoning_to_message(response.thinking)
    if "reasoning_details" in message:  # many clients read only the text
        message |= reasoning_to_message(response.thinking, "reasoning_content")
    return message | ({"refusal": text} if refused else {}) | ({"tool_calls": calls} if calls else {})


def _finish_reason(response: LLMResponse) -> str:
    if response.finish_reason in ("length", "content_filter"):
        return response.finish_reason
    is_call = any(isinstance(piece, ToolCallData) for piece in response.data)
    return "tool_calls" if is_call and response.finish_reason != "refusal" else "stop"


def _texts(message: Mapping[str, Any], lose: Report) -> list[TextData | ThinkingData]:
    content = optional(message, "content", str, list)
    if isinstance(content, str):
        return [TextData(content)]
    parts = [typed(part, "message.content[]", Mapping) for part in content or ()]
    for part in parts:
        if part.get("type") not in ("text", "thinking"):
            raise WireFormatError(f"Expected text parts in the response's `content`, got {shorten(part)}")
    return [
        TextData(required(part, "text", str)) if part["type"] == "text" else reasoning_of_part(part, lose)
        for part in parts
    ]


def _logprobs(choice: Mapping[str, Any], lose: Report) -> list[float] | None:
    logprobs = optional(choice, "logprobs", Mapping) or {}
    entries: list[Any] | None = list_of(logprobs, "content", Mapping)
    if entries is None:
        return None
    if any(entry.get("top_logprobs") for entry in entries):
        lose("`top_logprobs`, the alternatives to each token")
    return [float(required(entry, "logprob", *NUMBER)) for entry in entries]


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt, generated = optional(usage, "prompt_tokens", int) or 0, optional(usage, "completion_tokens", int) or 0
    reasoning = _detail(usage, "completion_tokens_details", "reasoning_tokens")
    if reasoning and usage.get("total_tokens") == prompt + generated + reasoning:
        generated += reasoning
    return Usage(
        prompt,
        generated,
        cached_tokens=_detail(usage, "prompt_tokens_details", "cached_tokens"),
        cache_write_tokens=_detail(usage, "prompt_tokens_details", "cache_write_tokens"),
        reasoning_tokens=reasoning,
    )


def _detail(usage: Mapping[str, Any], table: str, name: str) -> int:
    """Returns the token count `usage[table][name]`; 0 if missing or invalid, so that the response remains usable."""
    details = usage.get(table)
    count = details.get(name) if isinstance(details, Mapping) else None
    return count if type(count) is int and 0 <= count < MAX_COUNT else 0


_DETAIL_TEXTS = ("text", "summary", "data")


class StreamedCompletion(ResponseStream):
    """Assembles a streamed chat completion from its events, which are called chunks.

    | in the chunks | in the assembled response |
    |---|---|
    | strings in the `delta` (content, reasoning, refusal) | joined |
    | parts of the `content` (Mistral) | adjacent parts of the same type are joined |
    | `tool_calls` | merged by `index`, with joined arguments; a different id at the same index is a new call (Gemini) |
    | `reasoning_details` | merged by `index` and type; details without an index stay separate |
    | `logprobs.content`, `token_ids` | joined |
    | `usage`, `model`, `prompt_token_ids`, and all other fields | the last value that is not null |
    | `error` | the response failed |
    """

    def __init__(self) -> None:
        super().__init__()
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    @property
    def may_end(self) -> bool:
        """Whether `[DONE]` or a finish reason has been received. Some servers omit `[DONE]`."""
        return self.is_complete or any(choice.fields.get("finish_reason") for choice in self._choices.values())

    def read(self, event: Mapping[str, Any]) -> None:
        """Adds one chunk to the completion."""
        if event.get("error"):
            self.fail(event["error"])
            return
        self._fields |= {key: value for key, value in event.items() if key != "choices" and value is not None}
        for choice in list_of(event, "choices", Mapping) or ():
            self._choices.setdefault(optional(choice, "index", int) or 0, _Choice()).read(choice)

    def assembled(self) -> dict[str, Any]:
        """Returns the response body that results from the chunks so far."""
        choices = [{"index": index, **choice.assembled()} for index, choice in sorted(self._choices.items())]
        return {**self._fields, "object": "chat.completion", "choices": choices}


class _Choice:
    """One choice of a streamed completion. `fields` contains the last value of each field that is not merged."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self._lists: dict[str, list[Any]] = {}
        self._message: dict[str, Any] = {"role": "assistant"}
        self._texts: dict[str, list[str]] = {}
        self._parts: list[tuple[Any, Any, list[str]]] = []
        self._calls: list[_Call] = []
        self._details: list[dict[str, Any]] = []

    def read(self, choice: Mapping[str, Any]) -> None:
        for key, value in choice.items():
            if value is None or key == "index":
                continue
            if key == "delta":
                self._read_delta(typed(value, "delta", Mapping))
            elif key == "token_ids":
                self._lists.setdefault(key, []).extend(typed(value, key, list))
            elif key == "logprobs":
                content = list_of(typed(value, key, Mapping), "content", Mapping)
                self._lists.setdefault(key, []).extend(content or ())
            else:
                self.fields[key] = value

    def assembled(self) -> dict[str, Any]:
        lists: dict[str, Any] = dict(self._lists)
        if "logprobs" in lists:
            lists["logprobs"] = {"content": lists["logprobs"]}
        return {"finish_reason": None, **self.fields, **lists, "message": self._assembled_message()}

    def _assembled_message(self) -> dict[str, Any]:
        message = {"content": None, **self._message, **{name: "".join(text) for name, text in self._texts.items()}}
        if self._parts:
            before = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message["content"] = [*before, *(_assembled_part(*part) for part in self._parts)]
        if self._calls:
            message["tool_calls"] = [call.assembled() for call in self._calls]
        if self._details:
            message["reasoning_details"] = self._details
        return message

    def _read_delta(self, delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                for call in list_of(delta, key, Mapping) or ():
                    index, call_id = optional(call, "index", int), optional(call, "id", str)
                    known = [
                        one for one in self._calls if one.index == index and (not call_id or one.id in ("", call_id))
                    ]
                    if not known:
                        known = [_Call(index)]
                        self._calls += known
                    known[-1].read(call)
            elif key == "reasoning_details" and isinstance(value, list):
                for detail in value:
                    self._read_detail(detail)
            elif key == "content" and (isinstance(value, list) or (self._parts and isinstance(value, str))):
                for part in [{"type": "text", "text": value}] if isinstance(value, str) else value:
                    self._read_part(typed(part, "content[]", Mapping))
            elif isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
            elif value is not None:
                self._message[key] = value

    def _read_part(self, part: Mapping[str, Any]) -> None:
        kind = part.get("type")
        said = part.get("text") if kind == "text" else part.get("thinking") if kind == "thinking" else None
        inner = [{"text": said}] if isinstance(said, str) else said if isinstance(said, list) else []
        texts = [one.get("text") for one in inner if isinstance(one, Mapping)]
        if not inner or len(texts) != len(inner) or not all(isinstance(text, str) for text in texts):
            self._parts.append((None, part, []))
        elif self._parts and self._parts[-1][0] == kind:
            self._parts[-1][2].extend(map(str, texts))
        else:
            self._parts.append((kind, part, [str(text) for text in texts]))

    def _read_detail(self, detail: Any) -> None:
        index = detail.get("index") if isinstance(detail, Mapping) else None
        for known in self._details if index is not None else ():
            if (known.get("index"), known.get("type")) == (index, detail.get("type")):
                for key, value in detail.items():
                    joins = key in _DETAIL_TEXTS and isinstance(value, str) and isinstance(known.get(key), str)
                    known[key] = known[key] + value if joins else known.get(key) if value is None else value
                return
        self._details.append(dict(detail) if isinstance(detail, Mapping) else detail)


class _Call:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.id = ""
        self._name = ""
        self._arguments: list[str] = []
        self._fields: dict[str, Any] = {}

    def read(self, call: Mapping[str, Any]) -> None:
        function = optional(call, "function", Mapping) or {}
        self.id = self.id or optional(call, "id", str) or ""
        self._name = self._name or optional(function, "name", str) or ""
        self._arguments.append(optional(function, "arguments", str) or "")
        self._fields |= {
            key: value
            for key, value in call.items()
            if key not in ("index", "id", "function", "type") and value is not None
        }

    def assembled(self) -> dict[str, Any]:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {**self._fields, "id": self.id, "type": "function", "function": function}


def _assembled_part(kind: Any, part: Mapping[str, Any], texts: list[str]) -> Mapping[str, Any]:
    if kind is None:
        return part
    text = "".join(texts)
    return {**part, kind: text if kind == "text" else [{"type": "text", "text": text}]}
