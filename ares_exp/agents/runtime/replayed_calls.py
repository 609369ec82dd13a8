"""The matching of an agent's calls, when it is run again, with those in its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.agents.runtime.call_identity import CallIdentities, recorded
from ares_exp.agents.runtime.journal import CallEntry, CallKind, DoneEntry, Entry, SeedEntry
from ares_exp.errors import DivergenceError
from ares_exp.llms.request import LLMRequest


class JournalReplay:
    """Walks through a journal's entries.

    Calls that were made between two completions may come in any order: asyncio starts the members of a set, as
    `as_completed` and `wait` hold them, in the order of their addresses.

    Attributes:
        error: The first divergence. It is kept here, not raised into the agent, which might swallow it.
        last_call: Number of the last call in the journal.
    """

    def __init__(self, entries: Sequence[Entry], originals: Mapping[int, LLMRequest] | None = None) -> None:
        """Starts at the first entry.

        Args:
            entries: As they were read back.
            originals: Recorded requests, where they are still known, by their calls: for messages about divergences.
        """
        self.error: DivergenceError | None = None
        self._entries = [entry for entry in entries if isinstance(entry, CallEntry | DoneEntry | SeedEntry)]
        self._position = 0
        self._burst: list[tuple[int, CallEntry]] = []
        self._identities = CallIdentities()
        self._originals = originals or {}
        self.last_call = max((entry.call_id for entry in self._entries if isinstance(entry, CallEntry)), default=-1)

    def match(self, kind: CallKind, arguments: Any) -> int | None:
        """Returns the recorded number of a call that the agent makes now; `None` (and `error`) when there is none."""
        if self.error is not None:
            return None
        identity = self._identities.of(kind, arguments)
        self._load_burst()
        for place, (_, entry) in enumerate(self._burst):
            if entry.kind == kind and entry.arguments == identity:
                del self._burst[place]
                return entry.call_id
        if not self._burst:
            self._fail(self._position, f"it made one call more: {self._identities.shown(kind, arguments)}")
            return None
        alike = (one for one in self._burst if one[1].kind == kind)
        position, expected = next(alike, self._burst[0])
        original = self._originals.get(expected.call_id)
        self._fail(position, self._identities.difference(expected, kind, arguments, original))
        return None

    def next_event(self, *, finished: bool) -> DoneEntry | SeedEntry | None:
        """Returns the next completion to deliver, or seed to set; `None` at the end of the journal.

        Args:
            finished: Whether the agent has returned.

        Raises:
            DivergenceError: The agent has not made a call that it made then, or has made another one.
        """
        self._load_burst()
        if self.error is None and self._burst:
            position, entry = self._burst[0]
            does = "ended" if finished else "waited"
            self._fail(position, f"recorded was {recorded(entry)}; now it {does} without")
        if self.error is not None:
            raise self.error
        if self._position == len(self._entries):
            return None
        event = self._entries[self._position]
        assert not isinstance(event, CallEntry)
        self._position += 1
        return event

    def given_up(self, entry: DoneEntry) -> DivergenceError:
        """Makes the error for a completion of a call that the agent no longer waits for."""
        self._fail(self._position - 1, f"it had given up call {entry.call_id}, which it waited for then")
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
        answers = sum(isinstance(e, DoneEntry) and e.call_id in asked for e in self._entries[:position])
        self.error = DivergenceError(
            f"The agent, run again, did something else than recorded, after {answers} LLM responses (entry {position} "
            f"of {len(self._entries)} of its journal): {why}. What it does may depend on its container, its LLM, "
            "asyncio, and the functions of the modules `time`, `random` and `uuid`; not on object ids, the order of "
            "sets, datetime.now(), os.urandom or files of the host.",
            step=answers,
            entry=position,
            why=why,
        )
