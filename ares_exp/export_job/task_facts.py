"""What an export says of the tasks: where their files are, and what those say if they are still the same."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ares_exp.errors import TaskError
from ares_exp.export_job.recorded_job import RecordedJob
from ares_exp.tasks.recorded_digest import content_of
from ares_exp.tasks.task_origin import TaskOrigin

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """One task.

    Attributes:
        name: In its task.toml, or else as the run called it.
        path: Its directory, in its repository if it has one; the name where a task has no directory.
        source: The task set; `None` for a task by itself.
        digest: Of its content when it was played, `sha256:` and hex digits; `None` if it is not known.
        git_url, git_commit: The repository that it was fetched from; `None`: it was not.
        version: In its task.toml.
        verifier_mode: `"shared"` or `"separate"`: whether the verifier runs in the agent's container; `None` where that
            is not known, or is said for each step.
    """

    name: str
    path: str
    source: str | None = None
    digest: str | None = None
    git_url: str | None = None
    git_commit: str | None = None
    version: str | None = None
    verifier_mode: str | None = None

    @property
    def place(self) -> dict[str, str]:
        """Where it is found, as Harbor's ids of tasks say it."""
        if self.git_url is None or self.git_commit is None:
            return {"path": self.path}
        return {"git_url": self.git_url, "git_commit_id": self.git_commit, "path": self.path}


def tasks_of(job: RecordedJob) -> dict[str, TaskFacts]:
    """The tasks of a run, by the names that it gave them. Reads the tasks that are still there."""
    return {name: _facts(job, name, digest) for name, digest in job.tasks.items()}


def _facts(job: RecordedJob, name: str, digest: str | None) -> TaskFacts:
    digest = content_of(digest)
    facts = TaskFacts(name, name, digest=digest if digest is not None and _DIGEST.fullmatch(digest) else None)
    env = job.group("env")
    if not str(env.get("_target_")).endswith(".HarborEnvironments"):
        return replace(facts, source=job.option("env"))
    if (origin := _origin(job, name)) is not None:
        facts = replace(facts, path=origin.path, git_url=origin.git_url, git_commit=origin.git_commit)
        return _read(replace(facts, source=_source(env, origin)), _cached(env, origin, name))
    if (dataset := env.get("dataset")) is not None:
        return replace(facts, source=_dataset(dataset))
    root = _root(job, env.get("path"))
    is_task = root.name == name and len(job.tasks) == 1 and not (root / name).is_dir()
    path = root if is_task else root / name
    return _read(replace(facts, path=str(path), source=None if is_task else root.name), path)


def _root(job: RecordedJob, path: Any) -> Path:
    """The folder of tasks, or the task."""
    from ares_exp.tasks.task_set import SAMPLES

    if path is None:
        return SAMPLES
    return Path(str(job.provenance.get("cwd") or ".")).joinpath(str(path)).expanduser().resolve()


def _origin(job: RecordedJob, name: str) -> TaskOrigin | None:
    """Where a task was fetched from, if it was."""
    origins = job.provenance.get("task_origins")
    found = origins.get(name) if isinstance(origins, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    fields = [found.get(key) for key in ("git_url", "git_commit", "path")]
    return TaskOrigin(*map(str, fields)) if all(isinstance(one, str) for one in fields) else None


def _source(env: Mapping[str, Any], origin: TaskOrigin) -> str | None:
    """The name of the set that a fetched task is from; that of a folder in a repository is its address, as there."""
    if (dataset := env.get("dataset")) is not None:
        return _dataset(dataset)
    if env.get("repo") is None:
        return None
    place = origin.git_url.rpartition("://")[2].removesuffix(".git")
    return f"{place}/tree/{origin.git_commit}/{posixpath.dirname(origin.path) or '.'}"


def _dataset(text: Any) -> str:
    return str(text).partition("@")[0]


def _cached(env: Mapping[str, Any], origin: TaskOrigin, name: str) -> Path | None:
    """The copy of a fetched task, if it is still there."""
    from ares_exp.tasks.task_sources.cache import TaskCache, default_cache_dir

    folder = env.get("cache_dir")
    return TaskCache(default_cache_dir() if folder is None else Path(str(folder)).expanduser()).find(origin, name)


def _read(facts: TaskFacts, path: Path | None) -> TaskFacts:
    """The same with what the task says of itself, unless it is gone or has changed."""
    from ares_exp.tasks.harbor import load_task

    if path is None:
        return facts
    try:
        task = load_task(path)
        digest = task.digest
    except (TaskError, OSError, ValueError):
        return facts
    if facts.digest not in (None, digest):
        return facts
    package, modes = task.config.task, [stage.verifier_mode for stage in task.stages]
    return replace(
        facts,
        name=package.name if package is not None else facts.name,
        digest=digest,
        version=package.version if package is not None else None,
        verifier_mode=modes[0] if len(modes) == 1 and not task.stages[0].name else None,
    )
