"""Files in and out of a Docker container, through the engine's archive calls. Blocking: run it in a thread."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from ares_exp.containers.archive import pack, unpack_directory, unpack_file
from ares_exp.errors import TransferError

if TYPE_CHECKING:
    from docker import APIClient

# Bits of Go's file mode, which the engine reports.
_DIRECTORY, _SYMLINK = 1 << 31, 1 << 27
_MAX_LINKS = 10


def put(api: APIClient, container: str, source: Path, directory: str, file_name: str) -> None:
    """Unpacks `source` (see `archive.pack`) into `directory` of the container, which exists.

    Raises:
        TransferError: `source` cannot be read.
        docker.errors.DockerException, requests.exceptions.RequestException: The engine refused or is gone.
    """
    with pack(source, file_name) as packed:
        api.put_archive(container, directory, packed)


def get(api: APIClient, container: str, source: str, target: Path) -> None:
    """Copies the file or directory `source` of the container to `target`; a link is followed inside the container.

    Raises:
        TransferError: There is no such file, or it is not fit to be unpacked.
        docker.errors.DockerException, requests.exceptions.RequestException: The engine refused or is gone.
    """
    from docker.errors import NotFound

    path = source
    for _ in range(_MAX_LINKS):
        try:
            chunks, stat = api.get_archive(container, path)
        except NotFound as error:
            raise TransferError(f"Cannot download {source}: there is no such file in the container.") from error
        stream = cast("IO[bytes]", _ChunkReader(chunks))
        with contextlib.closing(chunks):  # an answer that is not read to its end holds a lock of the engine
            if stat["mode"] & _SYMLINK:
                path = posixpath.join(posixpath.dirname(path), stat["linkTarget"])
            elif stat["mode"] & _DIRECTORY:
                return unpack_directory(stream, target, strip_root=True)
            else:
                return unpack_file(stream, target)
    raise TransferError(f"Cannot download {source}: more than {_MAX_LINKS} symbolic links to follow.")


class _ChunkReader:
    """A readable file over the chunks of an answer."""

    def __init__(self, chunks: Generator[bytes, None, None]) -> None:
        self._chunks = chunks
        self._rest = bytearray()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest += chunk
        data = bytes(self._rest[:size])
        del self._rest[:size]
        return data
