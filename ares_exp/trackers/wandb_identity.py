"""The W&B run that records a run directory (`wandb/run.json`), so that resumes, branches and `wandb sync` find it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_options import sweep_run_id

MAX_BYTES = 2**20
UNKNOWN_STEPS = 10**6
"""Steps that earlier sessions are taken to have logged where the file does not say: more than any did."""


@dataclass(frozen=True, slots=True)
class WandbIdentity:
    """A W&B run, as its run directory knows it.

    Attributes:
        id: The run's id.
        project: Its project.
        entity: Its user or team; `None` is the account's default.
        steps: No session has logged a W&B step that is as high. Written before the steps are used, so that it holds
            after a kill, too.
        uploaded: Whether the service has the table and the artifacts of all sessions.
        confirmed: Folders of online sessions whose end the service has confirmed.
    """

    id: str
    project: str
    entity: str | None = None
    steps: int = 0
    uploaded: bool = False
    confirmed: tuple[str, ...] = ()

    def write(self, run_dir: Path) -> None:
        """Writes it into a run directory.

        Raises:
            OSError: It cannot be written.
        """
        write_atomically(_path(run_dir), dump_json(asdict(self), indent=2) + "\n")


def read_identity(run_dir: Path) -> WandbIdentity | None:
    """Returns the W&B run of a run directory; `None` where there is none that can be read."""
    try:
        data = read_json_object(_path(run_dir), max_bytes=MAX_BYTES)
    except (OSError, ConfigError):
        return None
    run_id, project, entity, steps, confirmed = (
        data.get(name) for name in ("id", "project", "entity", "steps", "confirmed")
    )
    if not (isinstance(run_id, str) and plain(run_id) == run_id and isinstance(project, str)):
        return None
    return WandbIdentity(
        run_id,
        project,
        entity if isinstance(entity, str) else None,
        steps if isinstance(steps, int) and steps >= 0 else UNKNOWN_STEPS,
        data.get("uploaded") is True,
        tuple(name for name in confirmed if isinstance(name, str)) if isinstance(confirmed, list) else (),
    )


def identity_of(info: RunInfo, *, project: str, entity: str | None) -> WandbIdentity:
    """Returns the W&B run for a run: that of earlier sessions, the W&B sweep's, or one with the run's own id."""
    if info.resumed and (earlier := read_identity(info.run_dir)) is not None:
        return earlier
    # A job of a Hydra sweep has siblings in this process: they cannot all be the one run that the agent has in mind.
    wanted = sweep_run_id() if info.group is None else None
    return WandbIdentity(plain(wanted or info.run_id), project, entity)


def plain(name: str) -> str:
    """Returns `name` with each character replaced that W&B refuses in a run id or an artifact's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def _path(run_dir: Path) -> Path:
    return run_dir / "wandb" / "run.json"
