"""A session of a W&B run: its record, its folders, its start and its end. Everything stays in the run directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pydantic

from ares_exp.containers.ownership import short_lived_directory
from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object
from ares_exp.records.run_dir import write_atomically
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    import wandb

SWEEP_VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")  # set by the agent of a W&B sweep
SETTINGS: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "finish_timeout_raises": True,
    "x_transaction_log_flush_interval": 0.1,  # seconds until a row is on disk: a run that is killed loses no more
    # The run's own provenance is free of secrets; W&B's has the bare command line and the git remote.
    "x_disable_meta": True,
    "x_disable_stats": True,  # its monitor is a process that leaves a socket in the temporary directory
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
}

# W&B's service process and its environment variables belong to the whole process.
_one_user_at_a_time = threading.Lock()
_open_runs: set[str] = set()  # ids of the W&B runs that were opened here and have not been closed


class WandbRecord(pydantic.BaseModel, frozen=True):
    """The file `wandb/run.json` of a run directory: its W&B run, the tracker's settings and the inputs.

    Attributes:
        task_set: Name of the artifact whose files are in the folder `wandb/task-set`; `None` without one.
        parents: Digests of the parents' trajectories, by run directory.
        linked: Whether the service has the links to task set and parents.
        logged_in: The run directory at the time when table and artifacts were complete, because W&B stores absolute
            paths. `None` if the run has not ended or was killed.
        scores_bytes: Size in bytes of the uploaded scores of `ares-exp score`.
    """

    id: str = pydantic.Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    project: str
    entity: str | None = None
    log_artifacts: bool = True
    snapshots_limit_mb: float = 100.0
    task_set: str | None = None
    parents: Mapping[Path, str] = pydantic.Field(default_factory=dict)
    linked: bool = False
    logged_in: Path | None = None
    scores_bytes: int = 0

    @classmethod
    def of(cls, info: RunInfo, settings: Mapping[str, Any]) -> Self:
        """Returns the record for a session: of the W&B run of earlier sessions, of the W&B sweep, or a new one."""
        # A job of a Hydra sweep has siblings in this process, and a W&B sweep's agent waits for one run.
        wanted = sweep_run_id() if info.group is None else None
        earlier = cls.read(info.run_dir) if info.resumed else None
        known = earlier.model_dump(include={"project", "entity", "id"}) if earlier else {}
        return cls(**{"id": plain(wanted or info.run_id), **settings, **known})

    def write(self, run_dir: Path, **changes: Any) -> Self:
        """Writes the record with some changes into a run directory, and returns it."""
        changed = self.model_copy(update=changes)
        write_atomically(run_dir / "wandb" / "run.json", changed.model_dump_json(indent=2) + "\n")
        return changed

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Reads the record of a run directory; `None` if it is missing. Raises `ConfigError` if it is broken."""
        path = run_dir / "wandb" / "run.json"
        try:
            return cls.model_validate(read_json_object(path, max_bytes=2**24)) if path.exists() else None
        except (OSError, pydantic.ValidationError) as error:
            raise ConfigError(f"Cannot read {path}: {error}") from None


def plain(name: str) -> str:
    """Returns `name` with each character replaced that W&B rejects in a run id or an artifact's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def sweep_run_id() -> str | None:
    """Returns the id that the agent of a W&B sweep chose for this process's run, if one started it."""
    return os.environ.get("WANDB_RUN_ID") or None if os.environ.get("WANDB_SWEEP_ID") else None


def open_run(record: WandbRecord, run_dir: Path, *, mode: str, settings: dict[str, Any], **more: Any) -> wandb.Run:
    """Opens a session of a W&B run whose files go into a directory. If W&B raises, no session is left.

    The mode is `online`, `offline`, or `auto`, which is `online` if W&B finds a key. `settings` are further settings of
    W&B, `more` are further arguments of `wandb.init`.
    """
    import wandb

    # Silent for the whole process, not only for the run: a W&B without a key would ask for one.
    wandb.setup(settings=wandb.Settings(silent=True))
    before = sessions(run_dir)
    try:
        if mode == "auto":  # with a run of the user, W&B has logged in before
            mode = "online" if wandb.run is not None or wandb.login(verify=False, prompt=False) else "offline"
        run = wandb.init(
            project=record.project,
            entity=record.entity,
            id=record.id,
            dir=str(run_dir),
            mode="offline" if mode == "offline" else "online",
            reinit="create_new",
            settings=wandb.Settings(**SETTINGS, **settings),
            # Also makes `wandb sync` append the offline record of a resumed run to the earlier upload.
            **{"resume": "allow", **more},
        )
    except BaseException:
        _end_service()
        for session in {*sessions(run_dir)} - {*before}:  # their record marks the run as ended
            shutil.rmtree(session, ignore_errors=True)
        raise
    _open_runs.add(run.id)
    return run


def close_run(run: wandb.Run, *, exit_code: int) -> None:
    """Finishes a W&B run. Ends W&B's service process, unless another run of this process uses it."""
    _open_runs.discard(run.id)
    run.finish(exit_code=exit_code)
    _end_service()


def _end_service() -> None:
    import wandb

    if not _open_runs and wandb.run is None:
        wandb.teardown()


def sessions(run_dir: Path) -> list[Path]:
    """Returns the folders of the sessions of a run's W&B run, in their order."""
    found = [path for path in (run_dir / "wandb").glob("*run-*") if not path.is_symlink()]
    return sorted(found, key=lambda path: path.name.removeprefix("offline-"))


def uploaded_mark(file: Path) -> Path:
    """Returns the file that marks a session's file as uploaded: `wandb sync` makes it, and an online session."""
    return file.with_name(f"{file.name}.synced")


@contextlib.contextmanager
def folders_in(folder: Path, run_id: str, *more: str) -> Iterator[None]:
    """Points W&B's own folders into `folder`, for one user at a time: environment variables set them.

    Hides a W&B sweep whose run is not `run_id`, because W&B prefers its id. `more` are further variables of folders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden = () if run_id == sweep_run_id() else SWEEP_VARIABLES
    values = dict.fromkeys(("WANDB_DATA_DIR", *more), str(folder.absolute()))
    values["WANDB_CACHE_DIR"] = str(folder.absolute() / "cache")
    # Otherwise even an offline run calls home.
    values["WANDB_ERROR_REPORTING"] = os.environ.get("WANDB_ERROR_REPORTING", "false")
    with _one_user_at_a_time:
        before = {name: os.environ.pop(name, None) for name in (*values, *hidden)}
        os.environ.update(values)
        try:
            yield
        finally:
            for name in before:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def no_traces() -> Iterator[Path]:
    """Keeps W&B's own logs and caches, which belong to no run, in a folder that is removed; if killed, by the next."""
    directory = short_lived_directory("wandb")
    try:
        with folders_in(directory.path, "", "WANDB_DIR", "TMPDIR"):
            yield directory.path
    finally:
        directory.remove()
