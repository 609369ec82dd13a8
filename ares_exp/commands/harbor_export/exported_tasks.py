"""The tasks of an exported run, as Harbor names and finds them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.commands.harbor_export.recorded_job import RecordedJob
from ares_exp.tasks.recorded_digest import content_of

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class ExportedTask:
    """One task.

    Attributes:
        name: As the run called it.
        place: Where it is, as Harbor's ids of tasks say it.
        source: The task set; `None` for a task by itself.
        checksum: Hex digest of its content when it was played; empty if it is not known.
    """

    name: str
    place: Mapping[str, str]
    source: str | None
    checksum: str


def exported_tasks(job: RecordedJob) -> dict[str, ExportedTask]:
    """Returns the tasks of a run by their names."""
    tasks = {}
    for name, digest in job.tasks.items():
        known = _DIGEST.fullmatch(content_of(digest) or "")
        tasks[name] = ExportedTask(name, *_place(job, name), known[1] if known else "")
    return tasks


def _place(job: RecordedJob, name: str) -> tuple[Mapping[str, str], str | None]:
    """The place and the source of a task."""
    from ares_exp.tasks.task_set import SAMPLES

    env, origins = job.group("env"), job.provenance.get("task_origins")
    if not str(env.get("_target_")).endswith(".HarborEnvironments"):
        return {"path": name}, job.option("env")
    dataset = None if env.get("dataset") is None else str(env["dataset"]).partition("@")[0]
    origin: Any = origins.get(name) if isinstance(origins, Mapping) else None
    if isinstance(origin, Mapping):
        url, commit, path = (str(origin.get(key)) for key in ("git_url", "git_commit", "path"))
        if dataset is None and env.get("repo") is not None:  # Harbor's name for a folder in a repository: its address
            address = url.rpartition("://")[2].removesuffix(".git")
            dataset = f"{address}/tree/{commit}/{posixpath.dirname(path) or '.'}"
        return {"git_url": url, "git_commit_id": commit, "path": path}, dataset
    if dataset is not None:
        return {"path": name}, dataset
    given = env.get("path")
    start = Path(str(job.provenance.get("cwd") or "."))
    root = SAMPLES if given is None else start.joinpath(str(given)).expanduser().resolve()
    is_task = root.name == name and len(job.tasks) == 1 and not (root / name).is_dir()
    return ({"path": str(root)}, None) if is_task else ({"path": str(root / name)}, root.name)
