"""Byte streams over pairs of FIFOs, between this process and a process in a local container, and file transfer.

Files are transferred as tar archives over the stream of a shell. So paths are resolved only inside the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ares_exp.cancellation import in_thread
from ares_exp.containers import archive
from ares_exp.containers.local.container_files import SEARCH_PATH
from ares_exp.errors import TransferError

_CHUNK_BYTES = 256 * 1024
_MAX_LINE_BYTES = 4096


@contextlib.contextmanager
def fifo_pair(directory: Path, name: str) -> Iterator[FifoStream]:
    """Creates two FIFOs, and yields a stream over our ends. A process in the container must open the other ends.

    The FIFOs are `name.in` and `name.out` in `directory`. The container sees this directory read-only, so it cannot
    replace a FIFO with a link. This process first opens all four ends, so that `open` never blocks and no process sees
    an early end of file. The stream stays open after the `with` block, unless the block raises an error.
    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        for path in (directory / f"{name}.in", directory / f"{name}.out"):
            os.mkfifo(path, 0o600)
            theirs.callback(path.unlink, missing_ok=True)
        _, writer = _open_fifo(directory / f"{name}.in", readers=theirs, writers=ours)
        reader, _ = _open_fifo(directory / f"{name}.out", readers=ours, writers=theirs)
        stream = FifoStream(reader=reader, writer=writer)
        ours.pop_all()  # now owned by the stream
        ours.callback(stream.close)
        yield stream
        ours.pop_all()


def _open_fifo(path: Path, *, readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    readers.callback(os.close, reader)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    writers.callback(os.close, writer)
    return reader, writer


class FifoStream:
    """A `ChannelStream` over our ends of a pair of FIFOs. At most one caller may read and one may write at a time."""

    def __init__(self, *, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[int, asyncio.Event] = {}
        self.is_closed = False

    async def read(self) -> bytes:
        """Reads the next bytes; `b""` at the end. Cancelling the call loses no data."""
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._reader, _CHUNK_BYTES)
            await self._ready(self._loop.add_reader, self._loop.remove_reader, self._reader)

    async def read_line(self) -> str:
        """Reads a line, up to a newline or the end. Use it only if the sender sends no data right after the line."""
        line = b""
        while not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES and (data := await self.read()):
            line += data
        return line.decode(errors="replace")

    async def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._writer, rest) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer, self._writer)

    def close(self) -> None:
        """Closes the stream in both directions. Waiting callers get an `OSError`. Idempotent."""
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
            # Unless the stream is closed or, after a cancellation, the next caller already waits.
            if not self.is_closed and self._waiters[descriptor] is waiter:
                remove(descriptor)
        if self.is_closed:
            raise BrokenPipeError("The stream to the container is closed.")


_PIECE_BYTES = 1024 * 1024
_STATUS = re.compile(rb"status (\d+)\n$")


async def send(stream: FifoStream, source: Path, target: str) -> None:
    """Copies a host file to the container's path `target`, or a host directory's contents into the directory `target`.

    `stream` must be a new shell of the container's root. It cannot be used afterwards. Raises `TransferError` with the
    path and the reason if the copy fails, and `OSError` if the stream breaks.
    """
    directory, name = (target, "") if source.is_dir() else posixpath.split(target)
    with await in_thread(lambda: archive.pack(source, name)) as packed:
        size = packed.seek(0, 2)
        packed.seek(0)
        # A single line that ends in `exit`: no byte of the archive is read as shell source, even after an error.
        command = f"mkdir -p -- {shlex.quote(directory)} && head -c {size} | tar -xpf - -C {shlex.quote(directory)}"
        await stream.write(_script(f"echo; {{ {command}; }} 2>&1; echo status $?; exit"))
        await stream.read_line()
        with contextlib.suppress(OSError):  # the container stopped reading; its reply has the reason
            while chunk := packed.read(_PIECE_BYTES):
                await stream.write(chunk)
    answer = b""
    while len(answer) < _PIECE_BYTES and (data := await stream.read()):
        answer += data
    status = _STATUS.search(answer)
    if status is None or status[1] != b"0":
        reason = answer.decode(errors="replace").rpartition("status")[0].strip()[-1000:] or "the container ended"
        raise TransferError(f"Cannot copy {source} to {target} in the container: {reason}.")


async def receive(stream: FifoStream, source: str, target: Path) -> None:
    """Copies a file, or a directory's contents, to the host path `target`. See `send` for `stream` and the errors."""
    directory, name = posixpath.split(source)
    pack_file = f"echo file; tar -chf - -C {shlex.quote(directory)} -- {shlex.quote('./' + name)}"
    pack_directory = f"echo directory; tar -cf - -C {shlex.quote(source)} ."
    quoted = shlex.quote(source)
    command = f"if [ -d {quoted} ]; then {pack_directory}; elif [ -e {quoted} ]; then {pack_file}; fi"
    await stream.write(_script(f"{{ {command}; }} 2>/dev/null; echo status $?; exit"))
    with tempfile.SpooledTemporaryFile(max_size=archive.SPOOL_BYTES) as packed:
        await _collect(stream, packed, source)
        kind = packed.readline()
        unpack = {b"file\n": archive.unpack_file, b"directory\n": archive.unpack_directory}.get(kind)
        if unpack is None:
            raise TransferError(f"Cannot copy {source} out of the container: the path does not exist.")
        await in_thread(lambda: unpack(packed, target))


async def _collect(stream: FifoStream, packed: IO[bytes], source: str) -> None:
    size, tail = 0, b""
    while data := await stream.read():
        packed.write(data)
        size, tail = size + len(data), (tail + data)[-32:]
        if size > archive.MAX_PACKED_BYTES:
            raise TransferError(f"Cannot copy {source} out of the container: it exceeds {archive.MAX_BYTES} bytes.")
    status = _STATUS.search(tail)
    if status is None or int(status[1]) > 1:  # 1: a file changed while it was read
        raise TransferError(f"Cannot copy {source} out of the container: `tar` cannot pack it.")
    packed.seek(0)


def _script(line: str) -> bytes:
    return f"export PATH={SEARCH_PATH}; {line}\n".encode("utf-8", "surrogateescape")
