"""Checkpoints of a training: folders that are written atomically, of which the newest are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.records.record_files import read_json_object
from ares_exp.records.run_dir import dump_json, sync_to_disk

STATE = "ares_exp.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: Folder of the checkpoint. A trainer of transformers can resume from it, and a policy can load it.
        step: Number of optimizer steps so far.
    """

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Reads the state that `Checkpoints.appearing` stored in the checkpoint.

        Raises:
            ConfigError: The file is not a valid JSON object.
        """
        return read_json_object(self.path / STATE)


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Stores the arguments.

        Args:
            folder: Folder with the checkpoints.
            keep: Number of newest checkpoints to keep.
        """
        self.folder = folder
        self._keep = keep

    def found(self) -> list[Checkpoint]:
        """Returns the complete checkpoints, from the oldest to the newest."""
        named = [(path, _NAME.fullmatch(path.name)) for path in self.folder.glob("checkpoint-*")]
        whole = [Checkpoint(path, int(name[1])) for path, name in named if name and (path / STATE).is_file()]
        return sorted(whole, key=lambda one: one.step)

    @contextmanager
    def appearing(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """Provides a temporary folder for a new checkpoint, which becomes visible if the body raises no exception.

        Afterwards, deletes the oldest checkpoints.

        Args:
            step: Number of optimizer steps so far.
            state: Further JSON-ready values to store in the checkpoint.

        Yields:
            The folder in which the caller creates `checkpoint-<step>`.
        """
        staging, name = self.folder / ".saving", f"checkpoint-{step}"
        shutil.rmtree(staging, ignore_errors=True)  # left behind by a killed process
        staging.mkdir(parents=True)
        try:
            yield staging
            (staging / name / STATE).write_text(dump_json({**state, "step": step}, indent=2) + "\n")
            for path in [*(staging / name).rglob("*"), staging / name]:
                sync_to_disk(path)
            if (self.folder / name).exists():
                shutil.rmtree(self.folder / name)
            (staging / name).replace(self.folder / name)
            sync_to_disk(self.folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for old in self.found()[: -self._keep]:
            old.path.replace(staging)  # a partly deleted folder must not count as a checkpoint
            shutil.rmtree(staging, ignore_errors=True)
