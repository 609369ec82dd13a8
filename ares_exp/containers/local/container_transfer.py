"""File transfer of a local container: tar archives over a shell's stream. Only the container resolves its paths."""

from __future__ import annotations

import posixpath
import re
import shlex
import tempfile
from pathlib import Path
from typing import IO

from ares_exp.cancellation import in_thread
from ares_exp.containers import archive
from ares_exp.containers.local.fifo_stream import FifoStream
from ares_exp.containers.local.host_root import SEARCH_PATH
from ares_exp.errors import TransferError

_CHUNK_BYTES = 1024 * 1024
_SPOOL_BYTES = 8 * 1024 * 1024
_HEADER_BYTES = 4096 * archive.MAX_MEMBERS // 4
_STATUS = re.compile(rb"status (\d+)\n$")


async def send(stream: FifoStream, source: Path, target: str) -> None:
    """Copies a host file to the container's path `target`, or a host directory's contents into that directory.

    Args:
        stream: A fresh shell of the container's root; cannot be used afterwards.
        source: A file or directory of the host.
        target: Absolute path in the container.

    Raises:
        TransferError: With the path and the reason.
        OSError: The stream broke.
    """
    directory, name = (target, "") if source.is_dir() else posixpath.split(target)
    with await in_thread(lambda: archive.pack(source, name)) as packed:
        size = packed.seek(0, 2)
        packed.seek(0)
        # One line that ends in `exit`: no byte of the archive is read as shell source, even after an error.
        command = f"mkdir -p -- {_quote(directory)} && head -c {size} | tar -xpf - -C {_quote(directory)}"
        await stream.write(_script(f"echo; {{ {command}; }} 2>&1; echo status $?; exit"))
        await stream.read_line()
        try:
            while chunk := packed.read(_CHUNK_BYTES):
                await stream.write(chunk)
        except OSError:
            pass  # the container stopped reading; the answer has the reason
    answer = b""
    while len(answer) < _CHUNK_BYTES and (data := await stream.read()):
        answer += data
    status = _STATUS.search(answer)
    if status is None or status[1] != b"0":
        reason = answer.decode(errors="replace").rpartition("status")[0].strip()[-1000:] or "the container ended"
        raise TransferError(f"Cannot copy {source} to {target} in the container: {reason}.")


async def receive(stream: FifoStream, source: str, target: Path) -> None:
    """Copies a file of the container to the host path `target`, or a directory's contents into that directory.

    Args:
        stream: A fresh shell of the container's root; cannot be used afterwards.
        source: Absolute path in the container.
        target: Host path.

    Raises:
        TransferError: With the path and the reason; a missing `source` included.
        OSError: The stream broke.
    """
    directory, name = posixpath.split(source)
    pack_file = f"echo file; tar -chf - -C {_quote(directory)} -- {_quote('./' + name)}"
    pack_directory = f"echo directory; tar -cf - -C {_quote(source)} ."
    command = f"if [ -d {_quote(source)} ]; then {pack_directory}; elif [ -e {_quote(source)} ]; then {pack_file}; fi"
    await stream.write(_script(f"{{ {command}; }} 2>/dev/null; echo status $?; exit"))
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as packed:
        await _collect(stream, packed, source)
        kind = packed.readline()
        unpack = {b"file\n": archive.unpack_file, b"directory\n": archive.unpack_directory}.get(kind)
        if unpack is None:
            raise TransferError(f"Cannot copy {source} out of the container: no such file or directory.")
        await in_thread(lambda: unpack(packed, target))


async def _collect(stream: FifoStream, packed: IO[bytes], source: str) -> None:
    """Reads the whole answer into `packed` and rewinds it.

    Raises:
        TransferError: It is too large, or the container could not pack all of it.
    """
    size, tail = 0, b""
    while data := await stream.read():
        packed.write(data)
        size, tail = size + len(data), (tail + data)[-32:]
        if size > archive.MAX_BYTES + _HEADER_BYTES:
            raise TransferError(f"Cannot copy {source} out of the container: more than {archive.MAX_BYTES} bytes.")
    status = _STATUS.search(tail)
    if status is None or int(status[1]) > 1:  # 1: a file changed while it was read
        raise TransferError(f"Cannot copy {source} out of the container: packing it failed.")
    packed.seek(0)


def _script(line: str) -> bytes:
    return f"export PATH={SEARCH_PATH}; {line}\n".encode("utf-8", "surrogateescape")


def _quote(path: str) -> str:
    return shlex.quote(path or "/")
