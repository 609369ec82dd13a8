"""The records of a `.wandb` file: a 7-byte header, then a LevelDB log (blocks of 32 KiB) of protobuf records.

The format is W&B's own business; the dependency is held below the next minor release for its sake.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ares_exp.run_dir import open_regular

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def record_files(run_dir: Path) -> list[Path]:
    """The `.wandb` files of a run directory, one for each session, in their order."""
    return sorted(
        (path for path in (run_dir / "wandb").glob("*run-*/run-*.wandb") if not path.parent.is_symlink()),
        key=lambda path: path.parent.name.removeprefix("offline-"),
    )


def read_records(path: Path) -> Iterator[Any]:
    """The records of a file, up to its end or to where a crash tore it.

    Raises:
        ValueError: It is no such file, or is broken.
        OSError: It cannot be read.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    with open_regular(path) as file:
        if file.read(len(HEADER)) != HEADER:
            raise ValueError(f"{path} is no record file of W&B")
        for data in _payloads(file, path):
            try:
                yield wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
            except DecodeError as error:
                raise ValueError(f"{path} holds a broken record: {error}") from None


def write_records(file: IO[bytes], records: Iterable[Any]) -> None:
    """Writes a whole file of records."""
    file.write(HEADER)
    position = len(HEADER)
    for record in records:
        data, kind = record.SerializeToString(), _FIRST
        while True:
            left = _BLOCK - position % _BLOCK
            if left < _CHUNK.size:
                file.write(bytes(left))
                position += left
                continue
            part, data = data[: left - _CHUNK.size], data[left - _CHUNK.size :]
            if not data:
                kind = _FULL if kind == _FIRST else _LAST
            file.write(_CHUNK.pack(_checksum(kind, part), len(part), kind) + part)
            position += _CHUNK.size + len(part)
            if not data:
                break
            kind = _MIDDLE


def next_step(run_dir: Path) -> int:
    """The step after the last that an earlier session logged; 0 when there is none to be found."""
    for path in reversed(record_files(run_dir)):
        last = -1
        try:
            for record in read_records(path):
                if record.WhichOneof("record_type") == "history":
                    last = max(last, _step(record.history))
        except (ValueError, OSError):
            pass  # what comes before the broken part counts
        if last >= 0:
            return last + 1
    return 0


def _step(history: Any) -> int:
    for item in history.item:
        if (item.key or "".join(item.nested_key)) == "_step":
            return int(json.loads(item.value_json))
    return int(history.step.num)


def _payloads(file: IO[bytes], path: Path) -> Iterator[bytes]:
    position, parts = len(HEADER), b""
    while True:
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK.size:
            file.read(left)
            position += left
            continue
        head = file.read(_CHUNK.size)
        if len(head) < _CHUNK.size:
            return
        checksum, length, kind = _CHUNK.unpack(head)
        part = file.read(length)
        if len(part) < length or kind == 0:
            return
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or _checksum(kind, part) != checksum:
            raise ValueError(f"{path} is broken at byte {position}")
        parts = (b"" if kind in (_FULL, _FIRST) else parts) + part
        position += _CHUNK.size + length
        if kind in (_FULL, _LAST):
            yield parts


def _checksum(kind: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(bytes([kind])))
