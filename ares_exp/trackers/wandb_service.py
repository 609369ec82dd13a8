"""Functions that open, close and record W&B runs. All files of W&B stay in the run directory."""

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
    "x_transaction_log_flush_interval": 0.1,  # seconds until a row is on disk; a killed run loses only newer rows
    # Unlike the run's provenance, W&B's contains the unmasked command line and git remote.
    "x_disable_meta": True,
    "x_disable_stats": True,  # W&B's monitor is a process that leaves a socket in the temporary directory
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
}

# W&B's service process and its environment variables are shared by all threads of this process.
_one_user_at_a_time = threading.Lock()
_open_runs: set[str] = set()  # ids of the W&B runs that `open_run` has opened and that are still open


class WandbRecord(pydantic.BaseModel, frozen=True):
    """The content of `wandb/run.json` in a run directory, which `ares-exp wandb sync` and resumed runs need.

    Attributes:
        task_set: Name of the artifact whose files are in the folder `wandb/task-set`; `None` without a task set.
        parents: Digests of the parents' trajectories, by run directory.
        linked: Whether the W&B run is linked to its task set and parents on the service.
        logged_in: Path of the run directory when its files were logged, at the end of the run or by a later sync;
            `None` before. W&B stores absolute paths, so a directory that was moved must be logged again.
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
        """Returns the record for a new session.

        A resumed run continues the W&B run of its earlier sessions. If a W&B sweep started the process, the session
        belongs to the W&B run of the sweep. Otherwise, the session belongs to a new W&B run.
        """
        # A Hydra sweep can run several jobs in this process, but the agent of a W&B sweep expects one run.
        wanted = sweep_run_id() if info.group is None else None
        earlier = cls.read(info.run_dir) if info.resumed else None
        known = earlier.model_dump(include={"project", "entity", "id"}) if earlier else {}
        return cls(**{"id": plain(wanted or info.run_id), **settings, **known})

    def write(self, run_dir: Path, **changes: Any) -> Self:
        """Writes the record to a run directory, after changing the fields in `changes`. Returns the changed record."""
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
    """Replaces the characters of `name` that W&B rejects in a run id or the name of an artifact."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def sweep_run_id() -> str | None:
    """Returns the run id that the agent of a W&B sweep chose for this process; `None` if no sweep started it."""
    return os.environ.get("WANDB_RUN_ID") or None if os.environ.get("WANDB_SWEEP_ID") else None


def open_run(record: WandbRecord, run_dir: Path, *, mode: str, settings: dict[str, Any], **more: Any) -> wandb.Run:
    """Opens a session of a W&B run, whose files are in `run_dir`. If W&B fails, removes the files of the session.

    Args:
        record: The W&B run to open.
        run_dir: The run directory.
        mode: `online`, `offline`, or `auto`, which is `online` if W&B finds a key.
        settings: Additional settings of W&B.
        more: Additional arguments of `wandb.init`.
    """
    import wandb

    # Makes W&B silent in the whole process, not only for the run, because it prompts for a missing key.
    wandb.setup(settings=wandb.Settings(silent=True))
    before = sessions(run_dir)
    try:
        if mode == "auto":  # if the user has opened a W&B run in this process, W&B is already logged in
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
        for session in {*sessions(run_dir)} - {*before}:  # the record in such a folder marks the run as ended
            shutil.rmtree(session, ignore_errors=True)
        raise
    _open_runs.add(run.id)
    return run


def close_run(run: wandb.Run, *, exit_code: int) -> None:
    """Finishes a W&B run. Ends W&B's service process unless another run in this process uses it."""
    _open_runs.discard(run.id)
    run.finish(exit_code=exit_code)
    _end_service()


def _end_service() -> None:
    import wandb

    if not _open_runs and wandb.run is None:
        wandb.teardown()


def sessions(run_dir: Path) -> list[Path]:
    """Returns the folders in which W&B recorded the sessions of a run, in order of their start."""
    found = [path for path in (run_dir / "wandb").glob("*run-*") if not path.is_symlink()]
    return sorted(found, key=lambda path: path.name.removeprefix("offline-"))


def uploaded_mark(file: Path) -> Path:
    """Returns the path of the marker that `wandb sync` or an online tracker creates after it has uploaded `file`."""
    return file.with_name(f"{file.name}.synced")


@contextlib.contextmanager
def folders_in(folder: Path, run_id: str, *more: str) -> Iterator[None]:
    """Sets environment variables so that W&B uses `folder` for its caches and logs while the context is open.

    Other threads wait for the context, because environment variables are shared. If a W&B sweep has set its variables
    for a run other than `run_id`, these variables are removed, because W&B would otherwise use the run of the sweep.
    `more` names additional variables to set to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden = () if run_id == sweep_run_id() else SWEEP_VARIABLES
    values = dict.fromkeys(("WANDB_DATA_DIR", *more), str(folder.absolute()))
    values["WANDB_CACHE_DIR"] = str(folder.absolute() / "cache")
    # Otherwise even an offline run sends error reports.
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
    """Makes W&B write logs and caches to a temporary folder, and yields this folder.

    The folder is removed when the context ends or, if the process is killed, by a later process.
    """
    directory = short_lived_directory("wandb")
    try:
        with folders_in(directory.path, "", "WANDB_DIR", "TMPDIR"):
            yield directory.path
    finally:
        directory.remove()
