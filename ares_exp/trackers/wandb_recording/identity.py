"""Which W&B run records a run directory: `wandb/run.json`, so that resumed runs and branches find it again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.record_files import read_json_object
from ares_exp.run_dir import dump_json, write_atomically
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_recording.options import sweep_run_id

MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class WandbIdentity:
    """A W&B run, as its run directory knows it.

    Attributes:
        id: The run's id.
        project: Its project.
        entity: Its user or team; `None` is the account's default.
        table: How far the episodes table was logged, as `EpisodesTable` says it.
    """

    id: str
    project: str
    entity: str | None = None
    table: Mapping[str, Any] = field(default_factory=dict)

    def write(self, run_dir: Path) -> None:
        """Writes it into a run directory.

        Raises:
            OSError: It cannot be written.
        """
        write_atomically(_path(run_dir), dump_json(asdict(self), indent=2) + "\n")


def read_identity(run_dir: Path) -> WandbIdentity | None:
    """The W&B run of a run directory; `None` where there is none that can be read."""
    try:
        data = read_json_object(_path(run_dir), max_bytes=MAX_BYTES)
    except (OSError, ConfigError):
        return None
    run_id, project, entity, table = (data.get(name) for name in ("id", "project", "entity", "table"))
    if not (isinstance(run_id, str) and plain(run_id) == run_id and isinstance(project, str)):
        return None
    return WandbIdentity(
        run_id, project, entity if isinstance(entity, str) else None, table if isinstance(table, Mapping) else {}
    )


def identity_of(info: RunInfo, *, project: str, entity: str | None) -> WandbIdentity:
    """The W&B run that is to record this run: that of earlier sessions, the sweep's, or one with the run's own id."""
    if info.resumed and (earlier := read_identity(info.run_dir)) is not None:
        return earlier
    # A job of a Hydra sweep has siblings in this process: they cannot all be the one run that the agent has in mind.
    wanted = sweep_run_id() if info.group is None else None
    return WandbIdentity(plain(wanted or info.run_id), project, entity)


def plain(name: str) -> str:
    """`name` with what W&B does not take in a run id or an artifact's name replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def _path(run_dir: Path) -> Path:
    return run_dir / "wandb" / "run.json"
