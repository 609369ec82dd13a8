"""A byte stream over a pair of FIFOs, between the runner and a process in a local container."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_CHUNK_BYTES = 256 * 1024


@contextlib.contextmanager
def fifo_pair(directory: Path, name: str) -> Iterator[FifoStream]:
    """Creates two FIFOs, `name.in` and `name.out`, for a process in the container to open during the context.

    All four ends are opened here first, so that `open` never blocks and neither side sees an early end of file. The
    container sees `directory` read-only, so it cannot replace a FIFO by a link.

    Yields:
        Our ends. They outlive the context, unless it fails; the names and the other ends do not.

    Raises:
        OSError: The FIFOs cannot be created: no space, no file descriptors.
    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        for path in (directory / f"{name}.in", directory / f"{name}.out"):
            os.mkfifo(path, 0o600)
            theirs.callback(path.unlink, missing_ok=True)
        _, writer = _open_fifo(directory / f"{name}.in", readers=theirs, writers=ours)
        reader, _ = _open_fifo(directory / f"{name}.out", readers=ours, writers=theirs)
        stream = FifoStream(reader=reader, writer=writer)
        ours.pop_all()  # now owned by the stream
        try:
            yield stream
        except BaseException:
            stream.close()
            raise


def _open_fifo(path: Path, *, readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    readers.callback(os.close, reader)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    writers.callback(os.close, writer)
    return reader, writer


class FifoStream:
    """A `ChannelStream` over our ends of a pair of FIFOs. One reader and one writer at a time."""

    def __init__(self, *, reader: int, writer: int) -> None:
        """Takes over two descriptors in non-blocking mode."""
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[int, asyncio.Event] = {}
        self.is_closed = False

    async def read(self) -> bytes:
        """Reads the next bytes; `b""` at the end. Cancelling it loses no data.

        Raises:
            OSError: The stream is closed.
        """
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._reader, _CHUNK_BYTES)
            await self._ready(self._loop.add_reader, self._loop.remove_reader, self._reader)

    async def read_line(self, limit: int = 4096) -> str:
        """Reads up to a newline or the end, and decodes; no data may follow the newline yet."""
        line = b""
        while not line.endswith(b"\n") and len(line) < limit and (data := await self.read()):
            line += data
        return line.decode(errors="replace")

    async def write(self, data: bytes) -> None:
        """Sends all of `data`.

        Raises:
            OSError: The other end is closed, or the stream is.
        """
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._writer, rest) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer, self._writer)

    def close(self) -> None:
        """Closes the stream in both directions; waiting callers get an `OSError`. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._reader)
        self._loop.remove_writer(self._writer)
        os.close(self._reader)
        os.close(self._writer)
        self._reader = self._writer = -1  # the numbers may belong to other files soon
        for waiter in self._waiters.values():
            waiter.set()

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool], descriptor: int) -> None:
        waiter = self._waiters[descriptor] = asyncio.Event()
        add(descriptor, waiter.set)
        try:
            await waiter.wait()
        finally:
            # Unless the stream is closed, or, after a cancellation, the next one waits already.
            if not self.is_closed and self._waiters[descriptor] is waiter:
                remove(descriptor)
        if self.is_closed:
            raise BrokenPipeError("The stream is closed.")
