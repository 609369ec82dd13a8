"""What comes out of a channel's shell: marks are told from output, and of the output only head and tail are kept."""

from __future__ import annotations

from collections.abc import Iterator

_MARK = b"\x1e"
_MAX_WORD_BYTES = 8192


class MarkParser:
    """Splits the byte stream of a shell into output and the marks `RS key SP word RS` that frame its scripts.

    A mark may be cut anywhere by the transport. Only new bytes and a carry shorter than a mark are searched: looking
    through all that came so far would cost the square of the output.
    """

    def __init__(self, key: str) -> None:
        """Args: key: Random hex, unknown to what runs in the box."""
        self._prefix = _MARK + key.encode() + b" "
        self._carry = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, str | None]]:
        """Yields (output, mark that follows it) pairs; the mark is `None` when none has come yet.

        Raises:
            ValueError: A mark does not end, so it is none of ours.
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
    """The first and the last `limit / 2` bytes of a stream of any length, in memory of the order of `limit`."""

    def __init__(self, limit: int) -> None:
        """Args: limit: Bytes to keep, at least 0."""
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def elided_bytes(self) -> int:
        """Bytes that fell out between head and tail."""
        return self._total - len(self._head) - min(len(self._tail), self._tail_limit)

    def add(self, data: bytes) -> None:
        """Appends `data`."""
        self._total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:  # now and then, so that the copying stays linear
            self._trim()

    def text(self) -> str:
        """Head and tail, decoded as UTF-8; invalid bytes become U+FFFD."""
        self._trim()
        if not self.elided_bytes:
            return (self._head + self._tail).decode("utf-8", "replace")
        return self._head.decode("utf-8", "replace") + self._tail.decode("utf-8", "replace")

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]
