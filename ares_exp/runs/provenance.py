"""The provenance of a run: the versions of its code and tasks, and the machine on which it ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ares_exp
from ares_exp.config.options import ENTRY_POINTS
from ares_exp.records.secrets import scrub_argv
from ares_exp.tasks.task_contract import TaskOrigin

_BESIDE = ("numpy", "openai")
"""Optional packages whose versions are recorded, because they can affect results."""
_GIT_TIMEOUT_SEC = 5.0


def collect_provenance(
    *, task_set_path: Path | None = None, task_origins: Mapping[str, TaskOrigin] | None = None
) -> dict[str, Any]:
    """Collects the versions of code and tasks and the facts about this machine that may explain a run's results.

    Returns:
        A JSON-ready mapping. `project` and `task_set` are the git states of the checkout of `ares_exp` and of the
        folder of tasks. Each is `{"commit", "dirty"}`, or `None` if git is missing or does not track the folder.
        `task_origins` is `{"git_url", "git_commit", "path"}` for each task that was fetched from git, by name.
        `packages` contains the versions of requirements and plugins, by name; `None` if a package is not installed. The
        other keys are `ares_exp_version`, `python`, `platform`, `hostname`, `pid`, `argv` (with masked secrets) and
        `python_hash_seed`.
    """
    checkout = Path(ares_exp.__file__).resolve().parent.parent
    return {
        "ares_exp_version": ares_exp.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _distributions()},
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "argv": scrub_argv(sys.argv),
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "project": _git_state(checkout) if (checkout / ".git").exists() else None,
        "task_set": _git_state(task_set_path) if task_set_path is not None else None,
        "task_origins": {name: asdict(origin) for name, origin in (task_origins or {}).items()},
    }


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the git commit of a folder, and whether files in it have changed (`{"commit": hash, "dirty": bool}`).

    Returns `None` if git is missing or does not track the folder.
    """
    folder = folder if folder.is_dir() else folder.parent
    # The output is empty if an enclosing repository does not track the folder, such as a virtual environment.
    if not _git(folder, "ls-tree", "--name-only", "HEAD", "."):
        return None
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--", ".")
    if status is None:
        return None
    headers = [line for line in status.splitlines() if line.startswith("# ")]
    commit = next((line.split()[-1] for line in headers if line.startswith("# branch.oid")), None)
    return {"commit": commit, "dirty": len(status.splitlines()) > len(headers)}


def _git(folder: Path, *arguments: str) -> str | None:
    # GIT_DIR, which hooks set, selects another repository. A repository can name a program (`core.fsmonitor`) to run.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_SEC,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _distributions() -> list[str]:
    from packaging.requirements import Requirement

    try:
        requirements = importlib.metadata.requires("ares-exp") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    ours = [Requirement(text).name for text in requirements if "extra ==" not in text]
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    plugins = [point.dist.name for point in points if point.dist is not None]
    return list(dict.fromkeys([*ours, *_BESIDE, *plugins]))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
