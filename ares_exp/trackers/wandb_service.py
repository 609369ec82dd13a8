"""W&B's settings, folders and service process. Everything stays in the run directory."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from ares_exp.containers.ownership import short_lived_directory
from ares_exp.records.secrets import scrub
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_identity import WandbIdentity
from ares_exp.trackers.wandb_options import SWEEP_VARIABLES, WandbOptions, sweep_run_id

if TYPE_CHECKING:
    import wandb

Report = Callable[[str], None]

FINISH_SHARE = 0.55
"""Of the bound on the tracker's `finish`: how long W&B waits for the end of the run. Files have had their share before;
one that is cut short from outside is never confirmed, not even when it is uploaded later."""
UPLOAD_TIMEOUT_SEC = 60.0
"""Bound on reaching the service to upload files."""
EXIT_GRACE_SEC = 10.0
"""How long W&B's service process may go on writing when this process ends and the end of a run was not confirmed."""

# W&B's service process and its environment variables belong to the whole process.
_one_tracker_at_a_time = threading.Lock()
_open_runs: set[str] = set()
"""Ids of the W&B runs that were opened here and have not been closed."""


def open_run(
    options: WandbOptions, info: RunInfo, identity: WandbIdentity, *, online: bool, report: Report
) -> wandb.Run:
    """Opens the W&B run: online if that is wanted and the service answers, else offline.

    Raises:
        Exception: Whatever W&B raises when even an offline run cannot be opened.
    """

    def opened(mode: Literal["online", "offline"]) -> wandb.Run:
        return _init(
            identity,
            _settings(options.init_timeout_sec, FINISH_SHARE * options.finish_timeout_sec),
            group=options.group or info.group,
            job_type=options.job_type or info.job_type,
            name=options.name or info.name,
            tags=[*dict.fromkeys((*info.tags, *options.tags))],
            config={**scrub(info.config), "provenance": scrub(info.provenance)},
            dir=str(info.run_dir),
            mode=mode,
            # Also makes `wandb sync` append what a resumed run recorded offline to what was uploaded before.
            resume="allow",
        )

    if online:
        before = {*_online_sessions(info.run_dir)}
        try:
            return opened("online")
        except Exception as error:
            report(
                f"cannot be reached, recording offline in {info.run_dir / 'wandb'} instead (upload it later with "
                f"`ares-exp wandb sync {info.run_dir}`): {first_line(error)}"
            )
            _end_service()
            for session in {*_online_sessions(info.run_dir)} - before:  # it says that the run has ended
                shutil.rmtree(session, ignore_errors=True)
    return opened("offline")


@contextlib.contextmanager
def uploading(identity: WandbIdentity, folder: Path, *, exit_code: int) -> Iterator[wandb.Run]:
    """Opens a W&B run that the service knows, to add to it.

    Args:
        identity: The run.
        folder: Where W&B's own files go.
        exit_code: What the run ends with.

    Raises:
        Exception: Whatever W&B raises.
    """
    try:
        run = _init(identity, _settings(UPLOAD_TIMEOUT_SEC, 0.0), dir=str(folder), mode="online", resume="must")
        try:
            yield run
        finally:
            close_run(run, exit_code=exit_code)
    finally:
        _end_service()


def close_run(run: wandb.Run, *, exit_code: int) -> None:
    """Finishes a W&B run. Ends W&B's service process, unless another run of this process uses it.

    Only then are the files whole, and W&B's threads and exit hook gone. The end of this process waits up to
    `EXIT_GRACE_SEC` for it.

    Raises:
        Exception: Whatever W&B raises.
    """
    _open_runs.discard(run.id)
    finished = threading.Event()
    # W&B's own exit hook writes a second end into the file of a run that is being finished, and `wandb sync` refuses
    # such a file for ever. Hooks run last in, first out: this one comes before it.
    before_exit = functools.partial(_wait_or_kill_service, finished)
    atexit.register(before_exit)
    try:
        run.finish(exit_code=exit_code)
    except Exception:
        _bound_the_exit()
        raise
    finally:
        finished.set()
        atexit.unregister(before_exit)
    _end_service()


def _wait_or_kill_service(finished: threading.Event) -> None:
    if not finished.wait(EXIT_GRACE_SEC):
        _kill_service()


def _bound_the_exit() -> None:
    """W&B's own exit hook waits as long as its service process tries to reach a service, which can be for ever."""
    name = "ares_exp-wandb-exit"
    if all(thread.name != name for thread in threading.enumerate()):
        threading.Thread(target=_kill_service_after_main, name=name, daemon=True).start()


def _kill_service_after_main() -> None:
    threading.main_thread().join()
    time.sleep(EXIT_GRACE_SEC)
    _kill_service()


def _kill_service() -> None:
    for child in psutil.Process().children():
        if child.name() == "wandb-core":
            child.kill()


def _end_service() -> None:
    import wandb

    if not _open_runs and wandb.run is None:
        wandb.teardown()


def _online_sessions(run_dir: Path) -> Iterator[Path]:
    return (run_dir / "wandb").glob("run-*")


def _init(identity: WandbIdentity, settings: wandb.Settings, **arguments: Any) -> wandb.Run:
    import wandb

    hooks = sys.exit, sys.excepthook
    # Silent for the whole process, not for the run alone: a W&B that lacks a key would else ask for one.
    wandb.setup(settings=wandb.Settings(silent=True))
    try:
        run = wandb.init(
            project=identity.project,
            entity=identity.entity,
            id=identity.id,
            reinit="create_new",
            settings=settings,
            **arguments,
        )
    finally:
        # W&B's hooks would print a second traceback and wrap every exit.
        sys.exit, sys.excepthook = hooks
    _open_runs.add(run.id)
    return run


def _settings(init_timeout_sec: float, finish_timeout_sec: float) -> wandb.Settings:
    """Returns the settings of a run; `finish_timeout_sec` 0 means no bound."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        init_timeout=init_timeout_sec,
        finish_timeout=finish_timeout_sec,
        finish_timeout_raises=True,
        # The run's own provenance is free of secrets; W&B's has the bare command line and the git remote.
        x_disable_meta=True,
        # Its monitor is a process that leaves a socket in the temporary directory when a run is short.
        x_disable_stats=True,
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
        save_code=False,
    )


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
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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


def first_line(error: Exception) -> str:
    """Returns an error of W&B in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
