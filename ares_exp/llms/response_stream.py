"""Assembly of a streamed response into the body that the endpoint would have sent without streaming.

Converters can therefore read responses with and without streaming. The body also contains content of the stream that
this package does not know, so that the converter can report it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.errors import WireFormatError
from ares_exp.llms.wire import shorten, typed

DONE = "[DONE]"
"""Data of the last event in chat-completions streams."""


class ResponseStream(ABC):
    """Assembles a streamed response. Call `add` with the data of each event until `is_complete` is set.

    Attributes:
        is_complete: Whether the last event was added.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._error: dict[str, Any] | None = None

    @property
    def may_end(self) -> bool:
        """Whether the response is complete if the stream ends now. Default: only after the last event."""
        return self.is_complete

    def add(self, data: str) -> None:
        """Adds the data of one server-sent event, a JSON text or `[DONE]`.

        Raises:
            WireFormatError: The event does not follow the wire format.
        """
        if data.strip() == DONE:
            self.is_complete = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise WireFormatError(f"Expected JSON in each event of a streamed response, got {shorten(data)}") from None
        self.read(typed(event, "an event", Mapping))

    def body(self) -> dict[str, Any]:
        """Returns the complete body, or the error of a failed response."""
        return {"error": self._error} if self._error is not None else self.assembled()

    @abstractmethod
    def read(self, event: Mapping[str, Any]) -> None:
        """Adds the parsed data of one event. `add` calls this method.

        Raises:
            WireFormatError: The event does not follow the wire format.
        """

    @abstractmethod
    def assembled(self) -> dict[str, Any]:
        """Returns the response body that results from the events so far."""

    def fail(self, error: Any) -> None:
        """Ends the response with an error. An error without a type becomes a server error."""
        fields = error if isinstance(error, Mapping) else {"message": str(error)}
        self._error = {"type": "server_error"} | {key: value for key, value in fields.items() if value is not None}
        self.is_complete = True


class EventReader:
    """Extracts the data of server-sent events from the bytes of a stream.

    Ignores names, ids and comments of events, because no supported API needs them. Also ignores an incomplete event at
    the end of the stream.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[str]:
        """Processes the next part of the stream. Yields the data of each event that is now complete."""
        first, *others = part.split(b"\n")
        self._line += first
        for line in others:
            yield from self._read(bytes(self._line))
            self._line = bytearray(line)

    def _read(self, line: bytes) -> Iterator[str]:
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            yield data.decode(errors="replace")
