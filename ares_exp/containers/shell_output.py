"""Parsing of a channel's output: marks are separated, and only head and tail of the rest are kept."""

from __future__ import annotations

from collections.abc import Iterator

_MARK = b"\x1e"
_MAX_WORD_BYTES = 8192


class MarkParser:
    """Splits the byte stream of a shell into output and the marks `RS key SP word RS` that frame its scripts.

    The transport may cut a mark anywhere. Only new bytes and a carry shorter than a mark are searched: searching
    everything received so far would take quadratic time.
    """

    def __init__(self, key: str) -> None:
        """Args: key: Random hex, unknown to programs in the container."""
        self._prefix = _MARK + key.encode() + b" "
        self._carry = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, str | None]]:
        """Yields (output, following mark) pairs; the mark is `None` while none has arrived.

        Raises:
            ValueError: A mark does not end, so it is not ours.
        """
        data, self._carry = self._carry + data, b""
        while (start := data.find(self._prefix)) >= 0:
            word = start + len(self._prefix)
            end = data.find(_MARK, word)
            if end < 0:
                if len(data) - word > _MAX_WORD_BYTES:
                    raise ValueError("A mark does not end.")
                self._carry = data[start:]
                yield data[:start], None
                return
            yield data[:start], data[word:end].decode("utf-8", "replace")
            data = data[end + 1 :]
        cut = data.rfind(_MARK, max(0, len(data) - len(self._prefix) + 1))
        if cut >= 0 and self._prefix.startswith(data[cut:]):
            data, self._carry = data[:cut], data[cut:]
        yield data, None


class BoundedOutput:
    """The first and the last `limit / 2` bytes of a stream of any length, in O(`limit`) memory."""

    def __init__(self, limit: int) -> None:
        """Args: limit: Bytes to keep, at least 0."""
        self._limit = limit
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def elided_bytes(self) -> int:
        """Bytes dropped between head and tail."""
        return max(0, self._total - self._limit)

    def add(self, data: bytes) -> None:
        """Appends bytes."""
        self._total += len(data)
        room = self._limit - self._tail_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:  # rarely, so that the copying stays linear
            del self._tail[: len(self._tail) - self._tail_limit]

    def text(self) -> str:
        """Returns head and tail, decoded as UTF-8; invalid bytes become U+FFFD."""
        if self._total <= self._limit:
            return (self._head + self._tail).decode("utf-8", "replace")
        tail = self._tail[max(0, len(self._tail) - self._tail_limit) :]
        return self._head.decode("utf-8", "replace") + tail.decode("utf-8", "replace")
