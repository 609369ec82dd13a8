"""A pseudo-terminal of a local container: the container's own `devpts`, opened from outside."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import struct
import termios
from pathlib import Path

from ares_exp.cancellation import cancel_all
from ares_exp.containers.local.fifo_stream import FifoStream

_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
LAST_WORDS_SEC = 0.05
"""Time after the end of the shell in which its last output arrives."""

_PTMX = os.makedev(5, 2)


def open_pseudo_terminal(pid: int, *, columns: int, lines: int) -> tuple[FifoStream, str]:
    """Opens a pseudo-terminal. Returns our end, and the path of the other end in the container.

    `/dev` and `/dev/pts` of the container are mounts that it cannot replace, so the path cannot lead elsewhere.
    """
    reader = os.open(
        Path("/proc", str(pid), "root/dev/pts/ptmx"),
        os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC,
    )
    try:
        found = os.fstat(reader)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != _PTMX:
            raise OSError("/dev/pts/ptmx of the container is not a pseudo-terminal")
        fcntl.ioctl(reader, _TIOCSPTLCK, struct.pack("i", 0))
        (number,) = struct.unpack("i", fcntl.ioctl(reader, _TIOCGPTN, struct.pack("i", 0)))
        fcntl.ioctl(reader, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        return FifoStream(reader=reader, writer=os.dup(reader)), f"/dev/pts/{number}"
    except BaseException:
        os.close(reader)
        raise


class LocalTerminal:
    """A `Terminal`. It hangs up when our end is closed, or when its shell ends, even with background processes."""

    def __init__(self, stream: FifoStream, shell: FifoStream) -> None:
        self._stream = stream
        self._shell = shell
        self._watching = asyncio.create_task(self._watch())

    async def read(self) -> bytes:
        return await self._stream.read()

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def close(self) -> None:
        await cancel_all(self._watching)

    async def _watch(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while await self._shell.read():
                    pass
                await asyncio.sleep(LAST_WORDS_SEC)
        finally:
            self._shell.close()
            self._stream.close()
