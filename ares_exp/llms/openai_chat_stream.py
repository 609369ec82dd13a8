"""Assembly of a streamed response in the chat-completions format. The events of the stream are called chunks.

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

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ares_exp.llms.response_stream import ResponseStream
from ares_exp.llms.wire import list_of, optional, typed

_DETAIL_TEXTS = ("text", "summary", "data")


class StreamedCompletion(ResponseStream):
    """Assembles a streamed chat completion from its chunks."""

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
