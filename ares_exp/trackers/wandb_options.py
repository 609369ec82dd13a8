"""The settings of the W&B tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

Mode = Literal["auto", "offline", "online", "disabled"]
SERVICE = "https://api.wandb.ai"
SWEEP_VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
"""Variables of the processes that the agent of a W&B sweep starts."""


@dataclass(frozen=True, slots=True)
class WandbOptions:
    """The arguments of `WandbTracker`, described there."""

    project: str
    entity: str | None
    group: str | None
    job_type: str | None
    name: str | None
    tags: tuple[str, ...]
    mode: Mode
    log_artifacts: bool
    log_trajectories: bool
    log_code: bool
    task_set_limit_mb: float
    snapshots_limit_mb: float
    init_timeout_sec: float
    finish_timeout_sec: float


def effective_mode(mode: Mode, environ: Mapping[str, str] = os.environ) -> Mode:
    """Returns the mode, with `auto` resolved: WANDB_MODE, else online with a key or in a W&B sweep, else offline.

    A key is in WANDB_API_KEY, or in the netrc file, where `wandb login` puts it.
    """
    if mode != "auto":
        return mode
    asked = environ.get("WANDB_MODE", "").lower()
    for known in get_args(Mode):
        if asked == known != "auto":
            return cast("Mode", known)
    has_key = environ.get("WANDB_API_KEY") or sweep_run_id(environ) or _is_logged_in(environ)
    return "online" if has_key else "offline"


def _is_logged_in(environ: Mapping[str, str]) -> bool:
    """Returns whether the netrc file has an entry for the service, as `wandb login` writes it."""
    named, home = environ.get("NETRC"), environ.get("HOME")
    paths = [Path(named)] if named else [Path(home, name) for name in (".netrc", "_netrc")] if home else []
    path = next((path for path in paths if path.is_file()), None)
    host = urlsplit(environ.get("WANDB_BASE_URL") or SERVICE).hostname
    try:
        return path is not None and host in netrc(path).hosts
    except (OSError, ValueError, NetrcParseError):
        return False


def sweep_run_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the id that a W&B sweep's agent wants this process's run to have, if one started it."""
    return environ.get("WANDB_RUN_ID") or None if environ.get("WANDB_SWEEP_ID") else None
