"""A streamed response: its events, put together to the body of a response that comes whole.

So streamed responses are read by the same converters as whole ones. What the parts of a stream hold beyond what is
known here is kept in the body, where the converter names it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ares_exp.errors import WireFormatError
from ares_exp.llms.wire import shorten, typed

DONE = "[DONE]"
"""The data of the last event of streams of OpenAI's older wire."""


class ResponseStream(ABC):
    """One answer, while it comes. `add` the data of its events until it `is_complete`.

    Attributes:
        is_complete: Whether its last event was added.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._error: dict[str, Any] | None = None

    @property
    def may_end(self) -> bool:
        """Whether it is one if the stream ends here. Default: only behind its last event."""
        return self.is_complete

    def add(self, data: str) -> None:
        """Adds the data of an event.

        Raises:
            WireFormatError: It is none of the wire's.
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
        """Returns the whole body, of a response that failed the error."""
        return {"error": self._error} if self._error is not None else self.assembled()

    @abstractmethod
    def read(self, event: Mapping[str, Any]) -> None:
        """Reads an event.

        Raises:
            WireFormatError: It is none of the wire's.
        """

    @abstractmethod
    def assembled(self) -> dict[str, Any]:
        """Returns the body that the events make."""

    def fail(self, error: Any) -> None:
        """Ends the response by an error; one that does not say whose it is counts as the server's."""
        fields = error if isinstance(error, Mapping) else {"message": str(error)}
        self._error = {"type": "server_error"} | {key: value for key, value in fields.items() if value is not None}
        self.is_complete = True


class EventReader:
    """Finds the data of events: names, ids and comments say nothing that the data of these wires does not.

    An event that the stream breaks off in is none.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[str]:
        """Yields the data of the events that a further part of the stream completes."""
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
