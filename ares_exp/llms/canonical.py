"""Fingerprints of requests: the same for two requests that ask the same, however their clients wrote them.

No part of what is asked are metadata, the service tier, marks for caches, how the answer is to be sent, reasoning in
the history, the origin, and how text is split into parts or JSON arguments are spaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ares_exp.llms.reasoning import REASONING_FIELDS
from ares_exp.llms.request import LLMRequest

_LEFT_OUT = frozenset({"cache_control", "defer_loading", *REASONING_FIELDS})


def fingerprint(request: LLMRequest) -> str:
    """Returns the fingerprint of a request: 32 hexadecimal digits."""
    asked = {
        "messages": [_message(message) for message in request.messages],
        "system": request.system_prompt,
        "tools": _plain(request.tools or ()),
        "tool_choice": _plain(request.tool_choice),
        "stop": request.stop_sequences,
    }
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _message(message: Mapping[str, Any]) -> Any:
    plain = _plain(message)
    plain["content"] = _content(plain.get("content"))
    for call in plain.get("tool_calls") or ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            function["arguments"] = _arguments(function.get("arguments"))
    return plain


def _content(content: Any) -> Any:
    """Joins parts that are all text; what is empty is no content."""
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in parts):
        return "".join(str(part["text"]) for part in parts) or None
    return content or None


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _plain(value: Any) -> Any:
    """Copies JSON-like data without what is no part of a question."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key not in _LEFT_OUT and item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
