"""Server-sent events, read from a stream of bytes."""

from __future__ import annotations

from collections.abc import Iterator


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
