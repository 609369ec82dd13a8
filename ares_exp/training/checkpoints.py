"""Checkpoints of a training: folders that appear whole, of which the last ones are kept."""

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
        path: Its folder, which a trainer of transformers can resume from, and a policy load.
        step: Number of optimizer steps so far.
    """

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Reads what this package keeps in it. Raises `ConfigError` when that is broken."""
        return read_json_object(self.path / STATE)


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Keeps the arguments.

        Args:
            folder: Where they are.
            keep: How many of the last ones stay.
        """
        self.folder = folder
        self._keep = keep

    def found(self) -> list[Checkpoint]:
        """Returns those that are whole, the newest last."""
        named = [(path, _NAME.fullmatch(path.name)) for path in self.folder.glob("checkpoint-*")]
        whole = [Checkpoint(path, int(name[1])) for path, name in named if name and (path / STATE).is_file()]
        return sorted(whole, key=lambda one: one.step)

    @contextmanager
    def appearing(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """A folder beside the others, which is a checkpoint when the body ends without an exception.

        Args:
            step: Number of optimizer steps so far.
            state: What else is to be kept, JSON-ready.

        Yields:
            The folder in which `checkpoint-<step>` is to be made.
        """
        staging, name = self.folder / ".saving", f"checkpoint-{step}"
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
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
            old.path.replace(staging)  # half of it is no checkpoint
            shutil.rmtree(staging, ignore_errors=True)
