"""Reads TensorBoard event files: records of a length, its checksum, an `Event` message, and its checksum.

The format is TFRecord (https://www.tensorflow.org/tutorials/load_data/tfrecord): a little-endian 64-bit length,
a masked CRC-32C of it, the data, a masked CRC-32C of the data.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event


def read_events(path: Path) -> Iterator[Event]:
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        content = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12])[0] == _masked(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == _masked(content)
        yield Event.FromString(content)
        data = data[16 + length :]


def _masked(data: bytes) -> int:
    checksum: int = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


class EventFiles:
    """The contents of the event files of a folder, in the order of their names.

    Attributes:
        scalars: (step, value) pairs by tag.
        texts: (step, text) pairs by tag.
        histograms: Histograms by tag.
        times: Epoch seconds of all events with a summary.
    """

    def __init__(self, folder: Path) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.texts: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.histograms: dict[str, Any] = {}
        self.times: list[float] = []
        self.files = sorted(folder.glob("events.out.tfevents.*"))
        for file in self.files:
            first, *events = read_events(file)
            assert first.file_version == "brain.Event:2"
            for event in events:
                self.times.append(event.wall_time)
                for value in event.summary.value:
                    self._add(event.step, value)

    def _add(self, step: int, value: Any) -> None:
        match value.WhichOneof("value"):
            case "simple_value":
                self.scalars[value.tag].append((step, value.simple_value))
            case "histo":
                self.histograms[value.tag] = value.histo
            case "tensor":
                assert value.metadata.plugin_data.plugin_name == "text"
                (text,) = value.tensor.string_val
                self.texts[value.tag].append((step, text.decode()))
