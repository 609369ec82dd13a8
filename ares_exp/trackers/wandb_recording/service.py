"""W&B's own side: its settings, its folders, its service process. Everything stays in the run directory."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ares_exp.secrets import scrub
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_recording.identity import WandbIdentity
from ares_exp.trackers.wandb_recording.options import SWEEP_VARIABLES, WandbOptions, sweep_run_id

if TYPE_CHECKING:
    import wandb

Report = Callable[[str], None]

EXIT_GRACE_SEC = 10.0
"""How long W&B's service process may go on trying at exit, after a run whose end was not confirmed."""

# W&B's service process and its environment variables belong to the whole process.
_one_tracker_at_a_time = threading.Lock()


def open_run(
    options: WandbOptions, info: RunInfo, identity: WandbIdentity, *, online: bool, report: Report
) -> wandb.Run:
    """Opens the W&B run: online if that is wanted and the service answers, else offline.

    Raises:
        Exception: Whatever W&B raises when even an offline run cannot be opened.
    """
    if online:
        before = set(_sessions(info.run_dir))
        try:
            return _init(options, info, identity, "online")
        except Exception as error:
            report(
                f"cannot be reached, recording offline in {info.run_dir / 'wandb'} instead (upload it later with "
                f"`python -m ares_exp.trackers sync {info.run_dir}`): {first_line(error)}"
            )
            end_service()
            for session in set(_sessions(info.run_dir)) - before:  # it says that the run has ended
                shutil.rmtree(session, ignore_errors=True)
    return _init(options, info, identity, "offline")


def _sessions(run_dir: Path) -> Iterator[Path]:
    """The folders of online sessions."""
    return (run_dir / "wandb").glob("run-*")


def _init(
    options: WandbOptions, info: RunInfo, identity: WandbIdentity, mode: Literal["online", "offline"]
) -> wandb.Run:
    import wandb

    hooks = sys.exit, sys.excepthook
    # Silent for the whole process, not for the run alone: a W&B that lacks a key would else ask for one.
    wandb.setup(settings=wandb.Settings(silent=True))
    try:
        return wandb.init(
            project=identity.project,
            entity=identity.entity,
            group=options.group or info.group,
            job_type=options.job_type or info.job_type,
            name=options.name or info.name,
            tags=[*dict.fromkeys((*info.tags, *options.tags))],
            id=identity.id,
            config={**scrub(info.config), "provenance": scrub(info.provenance)},
            dir=str(info.run_dir),
            mode=mode,
            # Also makes `wandb sync` append what a resumed run recorded offline to what was uploaded before.
            resume="allow",
            reinit="create_new",
            settings=_settings(options),
        )
    finally:
        # W&B's hooks would print a second traceback and wrap every exit.
        sys.exit, sys.excepthook = hooks


def _settings(options: WandbOptions) -> wandb.Settings:
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        init_timeout=options.init_timeout_sec,
        finish_timeout=0.9 * options.finish_timeout_sec,
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
def folders_of(info: RunInfo, run_id: str) -> Iterator[None]:
    """Points W&B's own folders into a run directory, for one tracker at a time: environment variables set them."""
    folder = (info.run_dir / "wandb").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, str | None] = {
        "WANDB_DATA_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        # Else an offline run, too, calls home.
        "WANDB_ERROR_REPORTING": os.environ.get("WANDB_ERROR_REPORTING", "false"),
    }
    if run_id != sweep_run_id():  # W&B would take the sweep's id all the same
        values |= dict.fromkeys(SWEEP_VARIABLES)
    with _one_tracker_at_a_time:
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
def no_traces() -> Iterator[dict[str, str]]:
    """An environment in which W&B's own logs and caches, which belong to no run, go to a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="ares_exp-wandb-", ignore_cleanup_errors=True) as folder:
        yield {**os.environ, **dict.fromkeys(("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TMPDIR"), folder)}


def end_service() -> None:
    """Ends W&B's service process, unless another run of this process uses it.

    Only then are the files whole, its threads and exit hook gone, and is the id of a run that failed to open free.
    """
    import wandb

    if wandb.setup().most_recent_active_run is None:
        wandb.teardown()


def bound_the_exit() -> None:
    """Bounds how long this process, when it ends, waits for W&B's service process, which may wait for a dead service.

    W&B's own exit hook waits for as long as it takes. What the process was given is on disk by then, on a machine that
    gives it time to write.
    """
    from wandb.sdk import wandb_setup

    connection = getattr(getattr(wandb_setup, "_singleton", None), "_connection", None)  # wandb.setup() would make one
    process = getattr(getattr(connection, "_proc", None), "_process", None)
    if process is not None:
        atexit.register(_kill_soon, process)  # runs before W&B's


def _kill_soon(process: subprocess.Popen[bytes]) -> None:
    timer = threading.Timer(EXIT_GRACE_SEC, process.kill)
    timer.daemon = True
    timer.start()


def first_line(error: Exception) -> str:
    """An error of W&B in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
