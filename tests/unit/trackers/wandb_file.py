"""Reads the records of a `.wandb` file: a 7-byte header, then a LevelDB log (32 KiB blocks) of protobuf records.

The format is W&B's own business; the dependency is held below the next minor release for this reader's sake.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandbFile:
    """What one W&B run left on disk."""

    def __init__(self, run_dir: Path) -> None:
        (path,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
        self.by_kind: dict[str, list[Any]] = {}
        for record in _records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            self.by_kind.setdefault(kind, []).append(getattr(record, kind))

    @property
    def run(self) -> Any:
        return self.by_kind["run"][0]

    @property
    def config(self) -> dict[str, Any]:
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{_key(i): json.loads(i.value_json) for i in row.item} for row in self.by_kind.get("history", [])]

    @property
    def summary(self) -> dict[str, Any]:
        return {_key(i): json.loads(i.value_json) for s in self.by_kind.get("summary", []) for i in s.update}

    @property
    def step_metrics(self) -> dict[str, str]:
        return {metric.name or metric.glob_name: metric.step_metric for metric in self.by_kind.get("metric", [])}

    @property
    def exit_codes(self) -> list[int]:
        return [record.exit_code for record in self.by_kind.get("exit", [])]


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    assert struct.unpack("<4sHB", data[:7]) == (b":W&B", 0xBEE1, 0)
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if left < 7 or (kind, length) == (0, 0):
            position += left
            continue
        parts = (b"" if kind in (_FULL, _FIRST) else parts) + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
