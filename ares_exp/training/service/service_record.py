"""The state of a service on disk, in the folder `service` of the run directory.

`record.jsonl` has one line per change: submissions, replaced attempts, cancellations, ends, acknowledgements and
versions. API keys are never written. For each episode that is not acknowledged, the file `<cursor>.json` contains its
line of `GET /v1/episodes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import append_durably, append_text, atomic_file, dump_json


class ServiceRecord:
    """The files of a service. All methods are blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "record.jsonl"

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yields the changes that earlier sessions recorded. Removes an incomplete last line of a killed process.

        Raises:
            ConfigError: The record cannot be read.
        """
        text = self._path.read_bytes() if self._path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.truncate(self._path, len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                read = json.loads(line)
                assert isinstance(read, dict)
            except (ValueError, RecursionError, AssertionError):
                raise ConfigError(f"Line {number} of {self._path} is not a JSON object.") from None
            yield read

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends a change to the record, and flushes it to the disk, so that it survives a power cut.

        Raises `OSError` if it cannot be written.
        """
        append_durably(self._path, f"{dump_json(line)}\n", flags=os.O_CREAT)

    def add_episode(self, cursor: int, text: str, line: Mapping[str, Any]) -> None:
        """Stores the line `text` of an episode, and appends the change `line` to the record.

        Both survive the end of this process, but not a power cut. Raises `OSError` if they cannot be written.
        """
        with atomic_file(self._folder / f"{cursor}.json", sync=False) as file:
            file.write(text.encode())
        append_text(self._path, f"{dump_json(line)}\n")

    def episode(self, cursor: int) -> bytes | None:
        """Returns the stored line of an episode; `None` if the episode was acknowledged."""
        try:
            return (self._folder / f"{cursor}.json").read_bytes()
        except FileNotFoundError:
            return None

    def remove_episodes(self, cursors: Iterable[int]) -> None:
        """Removes the lines of acknowledged episodes."""
        for cursor in cursors:
            (self._folder / f"{cursor}.json").unlink(missing_ok=True)

    def stored_episodes(self) -> set[int]:
        """Returns the cursors of all stored episodes."""
        return {int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()}
