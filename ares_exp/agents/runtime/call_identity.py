"""The identity of an agent's call: JSON-ready and small, with secrets masked on both sides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ares_exp.agents.runtime.journal import CallEntry, CallKind
from ares_exp.llms.request import LLMRequest
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.trajectories.request_diff import apart

SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class RequestPrint:
    """The identity of an LLM request: a digest of each message, and one of everything else."""

    settings: str
    messages: tuple[str, ...]


class CallIdentities:
    """Computes identities; each message is read once, however often it is repeated."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, Any], ...], str] = {}
        self._known_objects: dict[int, tuple[Mapping[str, Any], str]] = {}

    def of(self, kind: CallKind, arguments: Any) -> Any:
        """Returns the identity of a call: a `RequestPrint` of an LLM request, JSON-ready data of anything else."""
        if kind == "llm":
            return self.of_request(arguments)
        if kind in ("timer", "thread"):
            return arguments
        return _plain(arguments)

    def of_request(self, request: LLMRequest) -> RequestPrint:
        """Returns the identity of a request."""
        settings = {
            name: getattr(request, name)
            for name in request.__dataclass_fields__
            if name != "messages" and getattr(request, name) is not None
        }
        return RequestPrint(_digest(settings), tuple([self._of_message(message) for message in request.messages]))

    def _of_message(self, message: Mapping[str, Any]) -> str:
        known = self._known_objects.get(id(message))
        if known is not None and known[0] is message:
            return known[1]
        try:
            key = tuple(message.items())
            digest = self._known.get(key)
            if digest is None:
                digest = self._known[key] = _digest(message)
        except TypeError:  # content in parts: not hashable
            digest = _digest(message)
        self._known_objects[id(message)] = (message, digest)
        return digest

    def shown(self, kind: CallKind, arguments: Any) -> str:
        """Describes a call in a few words."""
        if kind == "llm":
            last = arguments.messages[-1] if arguments.messages else None
            return f"an LLM request with {len(arguments.messages)} messages, the last {_masked(last)[:SHOWN_CHARS]}"
        return f"a call for {kind} {_masked(arguments)[:SHOWN_CHARS]}"

    def difference(
        self, expected: CallEntry, kind: CallKind, arguments: Any, original: LLMRequest | None = None
    ) -> str:
        """Describes the difference between a call and the recorded one, as a clause.

        Args:
            expected: The recorded call.
            kind: What is asked for now.
            arguments: What identifies that.
            original: The request that was recorded, where it is still known: a journal on disk has only digests.
        """
        if expected.kind != kind:
            return f"recorded was {recorded(expected)}, now {self.shown(kind, arguments)}"
        if kind != "llm":
            was, now = _apart(_text(expected.arguments), _masked(arguments))
            return f"recorded was a call for {kind} {was}, now {now}"
        theirs, ours = expected.arguments.messages, self.of_request(arguments).messages
        at = next((i for i, (old, new) in enumerate(zip(theirs, ours, strict=False)) if old != new), None)
        if at is not None:
            now = _masked(arguments.messages[at])
            was, now = _apart(_masked(original.messages[at]), now) if original else ("", now[:SHOWN_CHARS])
            was = was and f"it was {was}, "
            return f"message {at + 1} of {len(ours)} of an LLM request is not the recorded one: {was}now it is {now}"
        if len(theirs) != len(ours):
            return f"recorded was an LLM request with {len(theirs)} messages, now {self.shown(kind, arguments)}"
        return "the settings of an LLM request (system prompt, tools, sampling) are not the recorded ones"


def recorded(entry: CallEntry) -> str:
    """Describes a call of a journal in a few words."""
    if isinstance(entry.arguments, RequestPrint):
        return f"an LLM request with {len(entry.arguments.messages)} messages"
    return f"a call for {entry.kind} {_text(entry.arguments)[:SHOWN_CHARS]}"


def _apart(was: str, now: str) -> tuple[str, str]:
    """Cuts both texts to start shortly before they differ."""
    start, was, now = apart(was, now, width=SHOWN_CHARS, before=SHOWN_CHARS // 4)
    dots = "…" if start else ""
    return f"{dots}{was}", f"{dots}{now}"


def _plain(data: Any) -> Any:
    """Makes a value JSON-ready, with secrets masked."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(item) for item in data]
    if isinstance(data, bool | int | float) or data is None:
        return data
    return mask_known_secrets(str(data))


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)


def _masked(data: Any) -> str:
    return mask_known_secrets(_text(data))


def _digest(data: Any) -> str:
    return hashlib.sha256(_masked(data).encode(errors="surrogatepass")).hexdigest()[:16]
