"""A streamed answer of the Messages wire, put together.

| in the events | here |
|---|---|
| `message_start` | the message; its counts are replaced by those at the end |
| `content_block_start` and its deltas | a block, texts and JSON joined |
| `message_delta` | the reason of the end, and the counts |
| `ping`, and events of a type that is not known | nothing, as the provider asks for |
| `error` | the answer failed |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ares_exp.llms.anthropic_messages import INVALID_ARGUMENTS
from ares_exp.llms.streamed_answer import StreamedAnswer
from ares_exp.llms.wire import optional, required

_JOINED = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""The field of a delta that is joined, by the type of the delta."""


class StreamedMessage(StreamedAnswer):
    """The events of a `message`."""

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, _Block] = {}

    @property
    def may_end(self) -> bool:
        """Only behind `message_stop`."""
        return self.is_complete and bool(self._message or self._error)

    def read(self, event: Mapping[str, Any]) -> None:
        """Reads an event."""
        kind = required(event, "type", str)
        if kind == "error":
            self.fail(event.get("error") or "no reason given")
        elif kind == "message_start":
            self._message = dict(required(event, "message", Mapping))
        elif kind == "content_block_start":
            self._blocks[required(event, "index", int)] = _Block(required(event, "content_block", Mapping))
        elif kind == "content_block_delta":
            index = required(event, "index", int)
            self._blocks.setdefault(index, _Block({})).read(required(event, "delta", Mapping))
        elif kind == "message_delta":
            self._end(event)
        elif kind == "message_stop":
            self.is_complete = True

    def assembled(self) -> dict[str, Any]:
        """Returns the message."""
        return {**self._message, "content": [block.assembled() for _, block in sorted(self._blocks.items())]}

    def _end(self, event: Mapping[str, Any]) -> None:
        self._message |= optional(event, "delta", Mapping) or {}
        counts = optional(event, "usage", Mapping) or {}
        known = optional(self._message, "usage", Mapping) or {}
        self._message["usage"] = {**known, **{key: count for key, count in counts.items() if count is not None}}


class _Block:
    """One block of the content."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._start = start
        self._joined: dict[str, list[str]] = {}
        self._others: dict[str, list[Any]] = {}

    def read(self, delta: Mapping[str, Any]) -> None:
        kind = required(delta, "type", str)
        if (field := _JOINED.get(kind)) is not None:
            self._joined.setdefault(field, []).append(required(delta, field, str))
        else:
            self._others.setdefault(kind, []).append(delta)

    def assembled(self) -> dict[str, Any]:
        joined = {field: "".join(parts) for field, parts in self._joined.items()}
        given = joined.pop("partial_json", "")
        block = {**self._start, **self._others}
        for field, text in joined.items():
            block[field] = f"{self._start.get(field) or ''}{text}"
        return {**block, "input": _input(given)} if given else block


def _input(text: str) -> dict[str, Any]:
    """Reads arguments; those that are no JSON object, because a bound cut them off, say, are kept as they are."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {INVALID_ARGUMENTS: text}
