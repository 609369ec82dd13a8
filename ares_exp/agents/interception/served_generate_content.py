"""The server side of the wire format of Google's generateContent API.

| in the request | result |
|---|---|
| model and method in the path, `alt` in the query | model and format of the response |
| `systemInstruction`, `contents`, `stopSequences` | supported, in camelCase or snake_case |
| `functionDeclarations` with `parameters` or `parametersJsonSchema`, `toolConfig` | supported; types of an OpenAPI \
schema become types of a JSON schema |
| `functionCall`, `functionResponse` without `id` | matched by name and order |
| `inlineData` in messages and function responses | supported |
| `thoughtSignature` created by ares_exp, parts with `thought` | reasoning of the message, verbatim |
| `maxOutputTokens`, `temperature`, `thinkingConfig` and similar fields (`SAMPLING`) | `origin.sampling` |
| `fileData`, `cachedContent`, `candidateCount` above 1 | rejected |
| tools of the provider (`googleSearch`), `responseSchema`, `safetySettings`, other signatures, and all other fields | \
listed in `origin.dropped` |

Clients such as gemini-cli do not send thoughts back in later requests, but they send the signature of the part after
the thoughts. The endpoint therefore encodes the complete reasoning in this signature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ares_exp.agents.interception.served_wire import (
    Asked,
    Losses,
    estimate_tokens,
    event,
    make_asked,
    slices,
    take,
    to_json,
    with_call_ids,
)
from ares_exp.errors import WireFormatError
from ares_exp.llms.chat_messages import (
    arguments_of_input,
    assistant_message,
    content_of,
    data_url,
    function_tool,
    image_part,
    input_of_arguments,
    seal,
    text_part,
    unsealed,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import (
    LLMResponse,
    Piece,
    TextData,
    ThinkingData,
    ToolCallData,
    Usage,
)
from ares_exp.llms.wire import Report, check_keys, list_of, on_loss, optional, required, shorten, typed

SAMPLING = frozenset(
    {
        "maxOutputTokens",
        "temperature",
        "topP",
        "topK",
        "seed",
        "candidateCount",
        "presencePenalty",
        "frequencyPenalty",
        "responseLogprobs",
        "logprobs",
        "thinkingConfig",
        "mediaResolution",
    }
)
"""Fields of `generationConfig` with sampling parameters and other options of the engine."""

_PATH = re.compile(
    r"/v1\w{0,9}/(?:[\w/-]{1,200}/)?models/(.{1,200}):(generateContent|streamGenerateContent|countTokens)"
)
_GENERATE = "/v1beta/models/{model}:generateContent"
_COUNT = "/v1beta/models/{model}:countTokens"
_REQUEST_KEYS = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model", "stream", "alt"}
_FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY", "refusal": "SAFETY"}
_TOOL_CHOICES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def split_path(path: str, alt: str) -> tuple[str, dict[str, Any]]:
    """Splits a path such as `/v1beta/models/NAME:streamGenerateContent` into two: the wire's path, and body fields.

    The fields contain the model and whether to stream. A path of another API is returned unchanged, without fields.
    `alt` is the query parameter with the format of a stream: `"sse"` for events, anything else for a list.
    """
    if (found := _PATH.fullmatch(path)) is None:
        return path, {}
    model, method = found.groups()
    if method == "countTokens":
        return _COUNT, {}
    return _GENERATE, {"model": model, "stream": method == "streamGenerateContent", "alt": alt}


class GenerateContentWire:
    """Google's generateContent API."""

    name = "generate_content"
    path = _GENERATE
    count_path: str | None = _COUNT

    def read(self, body: Any) -> Asked:
        """Converts the body of a request, with the fields from `split_path`, to an `Asked`."""
        losses = Losses()
        lose = on_loss(False, losses)
        body = _fields(body, "the request")
        check_keys(body, _REQUEST_KEYS | {"cachedContent"}, "request", lose)
        if body.get("cachedContent"):
            raise WireFormatError("`cachedContent` is not supported, because nothing is stored here. Send all contents")
        config, sampling = take(_fields(body.get("generationConfig") or {}, "generationConfig"), SAMPLING)
        if sampling.get("candidateCount", 1) != 1:
            raise WireFormatError(
                f"Expected `candidateCount` to be 1, got {shorten(sampling['candidateCount'])}: a request has one "
                "response"
            )
        if isinstance(top_k := sampling.get("topK"), float) and top_k.is_integer():
            sampling["topK"] = int(top_k)
        is_text = config.get("responseMimeType") == "text/plain"
        check_keys(config, {"stopSequences", *(["responseMimeType"] if is_text else [])}, "generation config", lose)
        tools = list(_tools(body, lose))
        is_stream = bool(optional(body, "stream", bool))
        request = LLMRequest(
            messages=list(_messages(required(body, "contents", list), lose)),
            system_prompt=_system_prompt(body, lose),
            tools=tools or None,
            tool_choice=_tool_choice(body, lose) if tools else None,
            stop_sequences=list_of(config, "stopSequences", str),
            stream=is_stream,
        )
        model = optional(body, "model", str)
        asked = make_asked(request, wire=self.name, model=model, prefix="", sampling=sampling, losses=losses)
        is_list = is_stream and body.get("alt", "sse") != "sse"
        return replace(asked, streamed=is_stream and not is_list, is_list=is_list)

    def whole(self, asked: Asked, response: LLMResponse) -> bytes:
        """Returns the response as one object, or as a list of one object if the client requested a list."""
        whole = _last_chunk(asked, _parts(asked, response), response)
        return to_json([whole] if asked.is_list else whole)

    def opening(self, asked: Asked) -> bytes:
        """Returns nothing, because a stream has no opening event."""
        return b""

    def keepalive(self, asked: Asked, number: int) -> bytes:
        """Returns an empty line, because Google's clients cannot read comments."""
        return b"\n"

    def events(self, asked: Asked, response: LLMResponse, keepalives: int) -> Iterator[bytes]:
        """Yields one event per part of the response. The last event also has the finish reason and the token counts."""
        parts = [*_sliced(_parts(asked, response))]
        for part in parts[:-1]:
            yield event(_chunk(asked, [part]))
        yield event(_last_chunk(asked, parts[-1:], response))

    def count(self, body: Any) -> bytes | None:
        """Returns an estimate of the tokens of a request."""
        return to_json({"totalTokens": estimate_tokens(body)})

    def error(self, status: int, message: str) -> bytes:
        """Returns the JSON body of an error."""
        name = _STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
        return to_json({"error": {"code": status, "message": message, "status": name}})


# Requests


def _fields(value: Any, where: str) -> dict[str, Any]:
    """Returns a JSON object without its null fields, and with names in camelCase. Clients may also use snake_case."""
    given = {key: item for key, item in typed(value, where, Mapping).items() if item is not None}
    return {re.sub(r"_([a-z])", lambda found: found[1].upper(), key): item for key, item in given.items()}


def _part_list(value: Any, where: str) -> list[dict[str, Any]]:
    return [_fields(part, "parts[]") for part in list_of(_fields(value, where), "parts", Mapping) or ()]


def _system_prompt(body: Mapping[str, Any], lose: Report) -> str | None:
    parts = _said(_part_list(body.get("systemInstruction") or {}, "systemInstruction"), lose)
    if any(part["type"] != "text" for part in parts):
        raise WireFormatError("Expected all parts of `systemInstruction` to be text")
    return "\n\n".join(part["text"] for part in parts) or None


def _messages(contents: Sequence[Any], lose: Report) -> Iterator[dict[str, Any]]:
    number = 0
    open_calls: list[ToolCallData] = []
    for value in contents:
        role = optional(_fields(value, "contents[]"), "role", str) or "user"
        parts = _part_list(value, "contents[]")
        if role == "model":
            pieces = list(_pieces(parts, lose))
            for index, piece in enumerate(pieces):
                if isinstance(piece, ToolCallData):
                    number += 1
                    pieces[index] = call = replace(piece, id=piece.id or f"call-{number}")
                    open_calls.append(call)
            yield assistant_message(pieces)
        elif role in ("user", "function"):
            results = [part for part in parts if "functionResponse" in part]
            yield from (_tool_message(part, open_calls, lose) for part in results)
            said = _said([part for part in parts if "functionResponse" not in part], lose)
            if said or not results:
                yield {"role": "user", "content": content_of(said)}
        else:
            raise WireFormatError(f"Expected `role` to be user or model, got {shorten(role)}")


def _pieces(parts: Sequence[Mapping[str, Any]], lose: Report) -> Iterator[Piece]:
    """Yields the texts, thoughts and tool calls of an earlier response, from the `parts` that the client sends back."""
    thoughts: list[ThinkingData] = []
    for part in parts:
        signature = optional(part, "thoughtSignature", str)
        if (sealed := unsealed(signature or "")) is not None:
            thoughts = sealed
        elif signature:
            lose("`thoughtSignature` of another provider")
        if optional(part, "thought", bool):
            thoughts += [] if sealed is not None else [ThinkingData(optional(part, "text", str) or "")]
            continue
        yield from thoughts
        thoughts = []
        if "functionCall" in part:
            call = _fields(part["functionCall"], "functionCall")
            check_keys(call, {"id", "name", "args"}, "function call", lose)
            arguments = arguments_of_input(optional(call, "args", Mapping) or {})
            yield ToolCallData(optional(call, "id", str) or "", required(call, "name", str), arguments)
        else:
            for one in _said([part], lose):
                if one["type"] == "text":
                    yield TextData(one["text"])
                else:
                    lose("`parts[inlineData]` of the model")
    yield from thoughts


def _tool_message(part: Mapping[str, Any], open_calls: list[ToolCallData], lose: Report) -> dict[str, Any]:
    """Converts a function response to a tool message. Removes the matching call (by id or name) from `open_calls`."""
    answer = _fields(part["functionResponse"], "functionResponse")
    check_keys(answer, {"id", "name", "response", "parts"}, "function response", lose)
    name, call_id = required(answer, "name", str), optional(answer, "id", str)
    named = [call for call in open_calls if call.id == call_id] or [call for call in open_calls if call.name == name]
    if named:
        open_calls.remove(named[0])
        call_id = named[0].id
    given = optional(answer, "response", Mapping) or {}
    text = given.get("output") if set(given) == {"output"} else None
    text = text if isinstance(text, str) else json.dumps(given, ensure_ascii=False)
    content = content_of([text_part(text), *_said(_part_list(answer, "functionResponse"), lose)])
    return {"role": "tool", "tool_call_id": call_id or "call-0", "content": content}


def _said(parts: Sequence[Mapping[str, Any]], lose: Report) -> list[dict[str, Any]]:
    """Converts Google's parts with text or media to content parts of an `LLMRequest`.

    Reports unsupported parts to `lose`, and rejects remote files with `WireFormatError`.
    """
    said: list[dict[str, Any]] = []
    for part in parts:
        if "text" in part or "inlineData" in part:
            check_keys(part, {"text", "inlineData", "thought", "thoughtSignature"}, "part", lose)
        if "text" in part:
            said.append(text_part(required(part, "text", str)))
        elif "inlineData" in part:
            blob = _fields(part["inlineData"], "inlineData")
            kind, data = required(blob, "mimeType", str), required(blob, "data", str)
            url = data_url(kind, data.replace("-", "+").replace("_", "/"))  # some clients send URL-safe base64
            file = {"filename": optional(blob, "displayName", str) or "document", "file_data": url}
            said.append(image_part(url) if kind.startswith("image/") else {"type": "file", "file": file})
        elif "fileData" in part:
            raise WireFormatError(
                f"Expected `inlineData`, got `fileData`: {shorten(part['fileData'])}. Remote files are not supported: "
                "embed the data."
            )
        else:
            lose(f"`parts[{next(iter(part), '')}]`, which ares_exp does not support")
    return said


def _tools(body: Mapping[str, Any], lose: Report) -> Iterator[dict[str, Any]]:
    for value in list_of(body, "tools", Mapping) or ():
        tool = _fields(value, "tools[]")
        for kind in set(tool) - {"functionDeclarations"}:
            lose(f"`tools[{kind}]`, a built-in tool of the provider")
        for one in list_of(tool, "functionDeclarations", Mapping) or ():
            function = _fields(one, "functionDeclarations[]")
            check_keys(function, {"name", "description", "parameters", "parametersJsonSchema"}, "tool", lose)
            schema = optional(function, "parametersJsonSchema", Mapping)
            schema = schema or _json_schema(optional(function, "parameters", Mapping) or {})
            yield function_tool(
                required(function, "name", str),
                optional(function, "description", str),
                schema or {"type": "object", "properties": {}},
            )


def _json_schema(schema: Any) -> Any:
    """Converts an OpenAPI schema to a JSON schema.

    Types become lower-case, `nullable` becomes the type `null`, and bounds such as `"maxItems": "3"` become numbers.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = _fields(schema, "parameters")
    is_nullable = made.pop("nullable", False) is True
    made.pop("propertyOrdering", None)
    for key, value in made.items():
        if key == "type" and isinstance(value, str):
            made[key] = [value.lower(), "null"] if is_nullable else value.lower()
        elif key == "items":
            made[key] = _json_schema(value)
        elif key == "properties" and isinstance(value, Mapping):
            made[key] = {name: _json_schema(item) for name, item in value.items()}
        elif key == "anyOf" and isinstance(value, list):
            made[key] = [_json_schema(item) for item in value]
        elif key[:3] in ("min", "max") and isinstance(value, str) and value.isdecimal():
            made[key] = int(value)
    return made


def _tool_choice(body: Mapping[str, Any], lose: Report) -> str | dict[str, Any] | None:
    config = _fields(body.get("toolConfig") or {}, "toolConfig")
    check_keys(config, {"functionCallingConfig"}, "tool config", lose)
    calling = _fields(config.get("functionCallingConfig") or {}, "functionCallingConfig")
    choice = _TOOL_CHOICES.get(optional(calling, "mode", str) or "")
    names = list_of(calling, "allowedFunctionNames", str) or []
    if choice == "required" and len(names) == 1:
        return {"type": "function", "function": {"name": names[0]}}
    if names:
        lose("`allowedFunctionNames` of the tool config")
    return choice


# Responses


def _parts(asked: Asked, response: LLMResponse) -> list[dict[str, Any]]:
    """Converts a response to Google's parts. The part after thoughts has a signature that encodes these thoughts."""
    parts: list[dict[str, Any]] = []
    thoughts: list[ThinkingData] = []
    for piece in with_call_ids(asked, response).data:
        if isinstance(piece, ThinkingData):
            thoughts.append(piece)
            if piece.content and not piece.redacted:
                parts.append({"text": piece.content, "thought": True})
            continue
        if isinstance(piece, ToolCallData):
            args = input_of_arguments(piece.arguments)
            part: dict[str, Any] = {"functionCall": {"id": piece.id, "name": piece.name, "args": args}}
        elif piece.content:
            part = {"text": piece.content}
        else:
            continue
        parts.append(part | ({"thoughtSignature": seal(*thoughts)} if thoughts else {}))
        thoughts = []
    if thoughts:
        parts.append({"text": "", "thought": True, "thoughtSignature": seal(*thoughts)})
    return parts


def _sliced(parts: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the parts, with long texts split into several parts. A signature stays at the first part of its text."""
    for part in parts:
        if "text" not in part:
            yield part
            continue
        first, *rest = slices(part["text"])
        yield {**part, "text": first}
        yield from ({"text": text} | ({"thought": True} if "thought" in part else {}) for text in rest)


def _chunk(asked: Asked, parts: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": parts}, "index": 0, **more}
    return {"candidates": [candidate], "modelVersion": asked.model, "responseId": asked.response_id}


def _last_chunk(asked: Asked, parts: Sequence[Mapping[str, Any]], response: LLMResponse) -> dict[str, Any]:
    reason = _FINISH_REASONS.get(response.finish_reason or "", "STOP")
    return _chunk(asked, parts, finishReason=reason) | {"usageMetadata": _usage(response.usage)}


def _usage(usage: Usage) -> dict[str, int]:
    """Returns the token counts. In this format, `candidatesTokenCount` excludes the tokens of thoughts."""
    return {
        "promptTokenCount": usage.prompt_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
        "candidatesTokenCount": max(0, usage.generated_tokens - usage.reasoning_tokens),
        "thoughtsTokenCount": usage.reasoning_tokens,
        "totalTokenCount": usage.total_tokens,
    }
