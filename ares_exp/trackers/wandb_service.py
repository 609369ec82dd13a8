"""A session of a W&B run: its record, its folders, its start and its end. Everything stays in the run directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pydantic

from ares_exp.containers.ownership import short_lived_directory
from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_json_object
from ares_exp.records.run_dir import write_atomically
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    import wandb

MAX_BYTES = 2**24
SWEEP_VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
"""Variables of the processes that the agent of a W&B sweep starts."""
FLUSH_SEC = 0.1
"""How often W&B writes what was logged to the disk: a run that is killed loses no more."""

# W&B's service process and its environment variables belong to the whole process.
_one_tracker_at_a_time = threading.Lock()
_open_runs: set[str] = set()
"""Ids of the W&B runs that were opened here and have not been closed."""


class WandbRecord(pydantic.BaseModel, frozen=True):
    """A JSON file in the folder `wandb` of a run directory."""

    FILE: ClassVar[str]

    def write(self, run_dir: Path) -> None:
        """Writes it into a run directory."""
        write_atomically(run_dir / "wandb" / self.FILE, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Reads that of a run directory; `None` where there is none. Raises `ConfigError` where it is broken."""
        path = run_dir / "wandb" / cls.FILE
        if not path.exists():
            return None
        try:
            return cls.model_validate(read_json_object(path, max_bytes=MAX_BYTES))
        except (OSError, pydantic.ValidationError) as error:
            raise ConfigError(f"Cannot read {path}: {error}") from None


class WandbIdentity(WandbRecord, frozen=True):
    """Which W&B run records a run directory, and its online sessions whose end the service has confirmed."""

    FILE = "run.json"
    id: str = pydantic.Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    project: str
    entity: str | None = None
    confirmed: tuple[str, ...] = ()


def read_identity(run_dir: Path) -> WandbIdentity | None:
    """Returns the W&B run of a run directory; `None` where there is none that can be read."""
    with contextlib.suppress(ConfigError):
        return WandbIdentity.read(run_dir)
    return None


def identity_of(info: RunInfo, *, project: str, entity: str | None) -> WandbIdentity:
    """Returns the W&B run for a run: that of earlier sessions, the W&B sweep's, or one with the run's own id."""
    if info.resumed and (earlier := read_identity(info.run_dir)) is not None:
        return earlier
    # A job of a Hydra sweep has siblings in this process: they cannot all be the one run that the agent has in mind.
    wanted = sweep_run_id() if info.group is None else None
    return WandbIdentity(id=plain(wanted or info.run_id), project=project, entity=entity)


def plain(name: str) -> str:
    """Returns `name` with each character replaced that W&B refuses in a run id or an artifact's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def sweep_run_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the id that a W&B sweep's agent wants this process's run to have, if one started it."""
    return environ.get("WANDB_RUN_ID") or None if environ.get("WANDB_SWEEP_ID") else None


def open_run(identity: WandbIdentity, run_dir: Path, *, online: bool, **arguments: Any) -> wandb.Run:
    """Opens a session of a W&B run whose files go into a directory. If W&B raises, no session is left.

    `init_timeout` and `finish_timeout` are settings, in seconds; other arguments are those of `wandb.init`.
    """
    import wandb

    timeouts = {name: arguments.pop(name) for name in ("init_timeout", "finish_timeout") if name in arguments}
    # Silent for the whole process, not for the run alone: a W&B that lacks a key would else ask for one.
    wandb.setup(settings=wandb.Settings(silent=True))
    before = sessions(run_dir)
    try:
        run = wandb.init(
            project=identity.project,
            entity=identity.entity,
            id=identity.id,
            dir=str(run_dir),
            mode="online" if online else "offline",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=FLUSH_SEC,
                # The run's own provenance is free of secrets; W&B's has the bare command line and the git remote.
                x_disable_meta=True,
                # Its monitor is a process that leaves a socket in the temporary directory when a run is short.
                x_disable_stats=True,
                x_save_requirements=False,
                disable_git=True,
                disable_code=True,
                save_code=False,
                **timeouts,
            ),
            # Also makes `wandb sync` append what a resumed run recorded offline to what was uploaded before.
            **{"resume": "allow", **arguments},
        )
    except BaseException:
        _end_service()
        for session in {*sessions(run_dir)} - {*before}:  # it says that the run has ended
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


@contextlib.contextmanager
def folders_of(run_dir: Path, run_id: str) -> Iterator[None]:
    """Points W&B's own folders into a run directory, for one tracker at a time: environment variables set them."""
    folder = (run_dir / "wandb").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, str | None] = {
        "WANDB_DATA_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        # Else an offline run, too, calls home.
        "WANDB_ERROR_REPORTING": os.environ.get("WANDB_ERROR_REPORTING", "false"),
    }
    if run_id != sweep_run_id():  # W&B would take the sweep's id all the same
        values |= dict.fromkeys(SWEEP_VARIABLES)
    with _one_tracker_at_a_time, _environment(values):
        yield


@contextlib.contextmanager
def no_traces() -> Iterator[Path]:
    """Has W&B's own logs and caches, which belong to no run, in a folder that is removed; if killed, by the next."""
    directory = short_lived_directory("wandb")
    try:
        names = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TMPDIR")
        with _environment(dict.fromkeys(names, str(directory.path))):
            yield directory.path
    finally:
        directory.remove()


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    before = dict(os.environ)
    for name in values:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in values if name in before})


def first_line(error: Exception) -> str:
    """Returns an error of W&B in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
