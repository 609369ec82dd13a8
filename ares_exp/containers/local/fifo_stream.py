"""A pair of FIFOs as a byte stream between the runner and a process in a local box."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_CHUNK_BYTES = 256 * 1024


@contextlib.contextmanager
def fifo_pair(directory: Path, name: str) -> Iterator[FifoStream]:
    """Two FIFOs, `name.in` and `name.out`, for a process in the box to open while the context lasts.

    All four ends are opened here first, so that nobody ever blocks in `open` and neither side sees an end of file too
    early. The box sees `directory` read-only: what is opened here is a FIFO of ours and no link of its own.

    Yields:
        Our ends. They outlive the context, unless it ends with an error; the names and the other ends do not.

    Raises:
        OSError: The FIFOs cannot be made: no space, no file descriptors.
    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        for path in (directory / f"{name}.in", directory / f"{name}.out"):
            os.mkfifo(path, 0o600)
            theirs.callback(path.unlink, missing_ok=True)
        _, writer = _open_fifo(directory / f"{name}.in", readers=theirs, writers=ours)
        reader, _ = _open_fifo(directory / f"{name}.out", readers=ours, writers=theirs)
        stream = FifoStream(reader=reader, writer=writer)
        ours.pop_all()  # the stream's now
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
    """Our ends of a pair of FIFOs; a `ChannelStream`. One reader and one writer at a time."""

    in_doubt = False

    def __init__(self, *, reader: int, writer: int) -> None:
        """Takes over two descriptors that are in non-blocking mode."""
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    async def read(self) -> bytes:
        """The next bytes; `b""` at the end. Cancelling it loses none.

        Raises:
            OSError: The stream is closed.
        """
        while True:
            self._check_open()
            with contextlib.suppress(BlockingIOError):
                return os.read(self._reader, _CHUNK_BYTES)
            await self._ready(self._loop.add_reader, self._loop.remove_reader, self._reader)

    async def read_line(self, limit: int = 4096) -> str:
        """Bytes up to a newline or the end, decoded; what follows the newline must not have been sent yet."""
        line = b""
        while not line.endswith(b"\n") and len(line) < limit and (data := await self.read()):
            line += data
        return line.decode(errors="replace")

    async def write(self, data: bytes) -> None:
        """Sends all of `data`.

        Raises:
            OSError: Nobody reads it any more, or the stream is closed.
        """
        rest = memoryview(data)
        while rest:
            self._check_open()
            try:
                rest = rest[os.write(self._writer, rest) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer, self._writer)

    def rest(self) -> None:
        """Nothing is to be done for it."""

    def close(self) -> None:
        """Ends the stream in both directions; who waits for it gets an `OSError`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._reader)
        self._loop.remove_writer(self._writer)
        os.close(self._reader)
        os.close(self._writer)
        for waiter in self._waiters.values():
            _wake(waiter)

    def _check_open(self) -> None:
        if self._closed:
            raise BrokenPipeError("The stream is closed.")

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool], descriptor: int) -> None:
        waiter = self._waiters[descriptor] = self._loop.create_future()
        add(descriptor, _wake, waiter)
        try:
            await waiter
        finally:
            # Else the stream is closed and the number belongs to somebody else, or, after a cancellation, the next
            # one waits already.
            if not self._closed and self._waiters[descriptor] is waiter:
                remove(descriptor)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
