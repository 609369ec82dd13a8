"""A streamed answer of the Responses wire, put together: the last event has it whole.

Some servers leave the items out there; then they are those of the events `response.output_item.done`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ares_exp.llms.streamed_answer import StreamedAnswer
from ares_exp.llms.wire import optional, required

_LAST = ("response.completed", "response.incomplete", "response.failed")


class StreamedResponse(StreamedAnswer):
    """The events of a `response`."""

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, Mapping[str, Any]] = {}
        self._response: Mapping[str, Any] = {}

    @property
    def may_end(self) -> bool:
        """Only with the event that has the response."""
        return self.is_complete and bool(self._response or self._error)

    def read(self, event: Mapping[str, Any]) -> None:
        """Reads an event."""
        kind = required(event, "type", str)
        if kind == "error":
            nested = event.get("error")
            self.fail(nested if nested else {key: event.get(key) for key in ("code", "message", "param")})
        elif kind == "response.output_item.done":
            place = optional(event, "output_index", int)
            self._items[len(self._items) if place is None else place] = required(event, "item", Mapping)
        elif kind in _LAST:
            self._response = required(event, "response", Mapping)
            self.is_complete = True

    def assembled(self) -> dict[str, Any]:
        """Returns the response."""
        items = [item for _, item in sorted(self._items.items())]
        return {**self._response, "output": self._response.get("output") or items}
