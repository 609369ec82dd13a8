"""Comparison of a replayed agent's calls with the recorded calls in its journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.agents.runtime.journal import CallEntry, CallKind, DoneEntry, Entry, SeedEntry
from ares_exp.errors import DivergenceError
from ares_exp.llms.request import LLMRequest
from ares_exp.records.secrets import mask_known_secrets
from ares_exp.trajectories.request_diff import apart

SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class RequestPrint:
    """The identity of an LLM request: a digest of each message, and one digest of all other fields."""

    settings: str
    messages: tuple[str, ...]


class CallIdentities:
    """Computes the identities of calls. A replay finds a recorded call by its identity, which equal calls share.

    The digests of messages are cached, because each request repeats the earlier messages.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, Any], ...], str] = {}
        self._known_objects: dict[int, tuple[Mapping[str, Any], str]] = {}

    def of(self, kind: CallKind, arguments: Any) -> Any:
        """Returns the identity of a call: a `RequestPrint` for an LLM request, JSON-ready data for other calls."""
        return self.of_request(arguments) if kind == "llm" else _plain(arguments)

    def of_request(self, request: LLMRequest) -> RequestPrint:
        """Returns the identity of an LLM request."""
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
        except TypeError:  # content in parts is not hashable
            digest = _digest(message)
        self._known_objects[id(message)] = (message, digest)
        return digest

    def shown(self, kind: CallKind, arguments: Any) -> str:
        """Returns a short description of a new call for an error message."""
        if kind == "llm":
            last = arguments.messages[-1] if arguments.messages else None
            return f"an LLM request with {len(arguments.messages)} messages, the last {_masked(last)[:SHOWN_CHARS]}"
        return f"a call for {kind} {_masked(arguments)[:SHOWN_CHARS]}"

    def difference(
        self, expected: CallEntry, kind: CallKind, arguments: Any, original: LLMRequest | None = None
    ) -> str:
        """Returns a clause for an error message that describes how a new call differs from the `expected` call.

        A journal on disk contains only digests of requests. To show the text of the expected request, pass this request
        as `original`.
        """
        if expected.kind != kind:
            return f"expected {recorded(expected)} as in the recording, got {self.shown(kind, arguments)}"
        if kind != "llm":
            was, now = _apart(_text(expected.arguments), _masked(arguments))
            return f"expected a call for {kind} {was} as in the recording, got {now}"
        theirs, ours = expected.arguments.messages, self.of_request(arguments).messages
        at = next((i for i, (old, new) in enumerate(zip(theirs, ours, strict=False)) if old != new), None)
        if at is not None:
            now = _masked(arguments.messages[at])
            was, now = _apart(_masked(original.messages[at]), now) if original else ("", now[:SHOWN_CHARS])
            was = was and f"it was {was}, "
            return f"message {at + 1} of {len(ours)} of an LLM request differs from the recording: {was}now it is {now}"
        if len(theirs) != len(ours):
            return f"expected {recorded(expected)} as in the recording, got {self.shown(kind, arguments)}"
        return "the settings of an LLM request (system prompt, tools, sampling) differ from the recording"


def recorded(entry: CallEntry) -> str:
    """Returns a short description of a recorded call for an error message."""
    if isinstance(entry.arguments, RequestPrint):
        return f"an LLM request with {len(entry.arguments.messages)} messages"
    return f"a call for {entry.kind} {_text(entry.arguments)[:SHOWN_CHARS]}"


def _apart(was: str, now: str) -> tuple[str, str]:
    """Returns excerpts of two strings. They start shortly before the first difference between the strings."""
    start, was, now = apart(was, now, width=SHOWN_CHARS, before=SHOWN_CHARS // 4)
    dots = "…" if start else ""
    return f"{dots}{was}", f"{dots}{now}"


def _plain(data: Any) -> Any:
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


class JournalReplay:
    """The position in a journal during a replay.

    Between two results in the journal, the agent may make the recorded calls in any order. For example, the
    functions `as_completed` and `wait` of asyncio store tasks in a set. Its order depends on memory addresses.

    Attributes:
        error: Error for the first call that differs from the journal; `None` if no call differs. It is not raised in
            the agent, because the agent might catch it.
        last_call: Number of the last call in the journal.
    """

    def __init__(self, entries: Sequence[Entry], originals: Mapping[int, LLMRequest] | None = None) -> None:
        """Starts at the first entry. `originals` contains recorded requests by call number, to quote them in errors."""
        self.error: DivergenceError | None = None
        self._entries = [entry for entry in entries if isinstance(entry, CallEntry | DoneEntry | SeedEntry)]
        self._position = 0
        self._burst: list[tuple[int, CallEntry]] = []
        self._identities = CallIdentities()
        self._originals = originals or {}
        self.last_call = max((entry.call_id for entry in self._entries if isinstance(entry, CallEntry)), default=-1)

    def match(self, kind: CallKind, arguments: Any) -> int | None:
        """Returns the number of the recorded call that matches a new call. Without a match, sets `error`."""
        if self.error is not None:
            return None
        identity = self._identities.of(kind, arguments)
        self._load_burst()
        for place, (_, entry) in enumerate(self._burst):
            if entry.kind == kind and entry.arguments == identity:
                del self._burst[place]
                return entry.call_id
        if not self._burst:
            self._fail(
                self._position,
                f"it made a call that is not in the recording: {self._identities.shown(kind, arguments)}",
            )
            return None
        alike = (one for one in self._burst if one[1].kind == kind)
        position, expected = next(alike, self._burst[0])
        original = self._originals.get(expected.call_id)
        self._fail(position, self._identities.difference(expected, kind, arguments, original))
        return None

    def next_event(self, *, finished: bool) -> DoneEntry | SeedEntry | None:
        """Returns the next result or change of the seed, or `None` at the end of the journal.

        `finished` is whether the agent has ended. It only affects the error message.

        Raises:
            DivergenceError: The agent has not made a recorded call, or has made a different call.
        """
        self._load_burst()
        if self.error is None and self._burst:
            position, entry = self._burst[0]
            does = "ended" if finished else "waited"
            self._fail(position, f"expected {recorded(entry)} as in the recording, but it {does} without this call")
        if self.error is not None:
            raise self.error
        if self._position == len(self._entries):
            return None
        event = self._entries[self._position]
        assert not isinstance(event, CallEntry)
        self._position += 1
        return event

    def given_up(self, entry: DoneEntry) -> DivergenceError:
        """Returns the error for a replayed agent that has cancelled a call whose result is recorded in the journal."""
        self._fail(self._position - 1, f"it cancelled call {entry.call_id}, but waited for it in the recording")
        assert self.error is not None
        return self.error

    def _load_burst(self) -> None:
        if self._burst:
            return
        while self._position < len(self._entries):
            entry = self._entries[self._position]
            if not isinstance(entry, CallEntry):
                break
            self._burst.append((self._position, entry))
            self._position += 1

    def _fail(self, position: int, why: str) -> None:
        asked = {e.call_id for e in self._entries if isinstance(e, CallEntry) and e.kind == "llm"}
        responses = sum(isinstance(e, DoneEntry) and e.call_id in asked for e in self._entries[:position])
        self.error = DivergenceError(
            f"The replayed agent differs from its recording after {responses} LLM responses (entry {position} "
            f"of {len(self._entries)} of its journal): {why}. A replayable agent may depend only on its container, its "
            "LLM, asyncio, and the functions of the modules `time`, `random` and `uuid`. It must not depend on object "
            "ids, the order of sets, datetime.now(), os.urandom or files of the host.",
            step=responses,
            entry=position,
            why=why,
        )
