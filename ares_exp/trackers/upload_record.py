"""The record of a W&B run's files (`wandb/upload.json`), from which `wandb sync` uploads its table and its artifacts.

An offline run of W&B cannot take inputs, and notes the files of artifacts by absolute paths. So the table and the
artifacts of an offline run are made when it is uploaded, from this record and the files of the run directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object
from ares_exp.records.run_dir import write_atomically
from ares_exp.trackers.episodes_table import EpisodePages

MAX_BYTES = 2**24


class Prepared(pydantic.BaseModel, frozen=True):
    """An artifact whose files lie ready in the folder `wandb/<type>`.

    Attributes:
        name: The artifact's name.
        type: Its type in W&B.
        metadata: Its metadata in W&B.
    """

    name: str
    type: Literal["task-set", "code"]
    metadata: dict[str, Any] = {}


class Parent(pydantic.BaseModel, frozen=True):
    """A run that this one was branched from, or replays.

    Attributes:
        path: Its run directory.
        digest: The digest of its trajectories' artifact.
    """

    path: Path
    digest: str


class UploadRecord(pydantic.BaseModel, frozen=True):
    """The files of a W&B run that are not in the run directory's other records.

    Attributes:
        log_artifacts: Whether trajectories and snapshots become artifacts.
        log_trajectories: Whether the report has trajectories.
        snapshots_limit_mb: The artifact of a larger snapshot store has a listing alone.
        prepared: Artifacts whose files lie ready.
        parents: The runs that this one was branched from, or replays.
        snapshot_dir: The snapshot store, from the run directory if it lies there; `None` before the session's end, and
            when there is none.
        snapshots: How many snapshots are in it.
        exit_code: That of the W&B run.
    """

    log_artifacts: bool
    log_trajectories: bool = True
    snapshots_limit_mb: float
    prepared: tuple[Prepared, ...] = ()
    parents: tuple[Parent, ...] = ()
    snapshot_dir: Path | None = None
    snapshots: int = 0
    exit_code: int = 1

    def write(self, run_dir: Path) -> None:
        """Writes it into a run directory.

        Raises:
            OSError: It cannot be written.
        """
        write_atomically(_path(run_dir), self.model_dump_json(indent=2) + "\n")


def read_upload_record(run_dir: Path) -> UploadRecord | None:
    """Returns the record of a run directory; `None` where there is none.

    Raises:
        ConfigError: It cannot be read.
    """
    path = _path(run_dir)
    if not path.exists():
        return None
    try:
        return UploadRecord.model_validate(read_json_object(path, max_bytes=MAX_BYTES))
    except (OSError, pydantic.ValidationError) as error:
        raise ConfigError(f"Cannot read {path}: {error}") from None


def prepared_folder(run_dir: Path, kind: str) -> Path:
    """Returns the folder with the files of a prepared artifact."""
    return run_dir / "wandb" / kind


def report_of(run_dir: Path) -> Path:
    """Returns the place of the report for W&B."""
    return run_dir / "wandb" / "report.html"


def pages_of(run_dir: Path) -> EpisodePages:
    """Returns the pages of a run's trajectories."""
    return EpisodePages(run_dir / "wandb" / "pages")


def _path(run_dir: Path) -> Path:
    return run_dir / "wandb" / "upload.json"
