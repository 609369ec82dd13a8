"""What of a run becomes W&B artifacts, and how they hang together: task set -> run -> trajectories -> branch run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ares_exp.run_dir import RunDir, dump_json
from ares_exp.run_summary import RunSummary
from ares_exp.secrets import KnownSecrets, scrub
from ares_exp.tasks.content_digest import content_digest, digested_files
from ares_exp.tasks.recorded_digest import content_of
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_recording.identity import plain, read_identity
from ares_exp.trajectories.files.episode_file import PARTIAL

if TYPE_CHECKING:
    import wandb

MEGABYTE = 10**6
MAX_FILES = 50_000
"""Of one artifact; W&B passes longer lists on in a file, with paths that no move of the run directory survives."""


def task_set_artifact(info: RunInfo, scratch: Path, *, limit_mb: float) -> wandb.Artifact | None:
    """The tasks that a run plays; `None` where they are not known.

    Names and digests of all, and from which commits those of git repositories are. Of tasks in a folder the files, too,
    up to the limit, but for those that hold the value of a secret.

    Raises:
        OSError: A task cannot be read.
    """
    import wandb

    if not info.tasks:
        return None
    root = info.task_set or Path()
    base = root.parent if (root / TASK_TOML).exists() else root
    folders = {name: base / name for name in info.tasks if info.task_set and (base / name / TASK_TOML).is_file()}
    files = [folder / name for folder in folders.values() for name in digested_files(folder)]
    options = scrub(info.config.get("env") or {})
    metadata = {"tasks": len(info.tasks), "env": options}
    artifact = wandb.Artifact(plain(f"task-set-{_task_set_name(info, options)}"), type="task-set", metadata=metadata)
    digests = {name: content_of(info.task_digests.get(name)) for name in sorted(info.tasks)}
    digests |= {name: content_digest(folder) for name, folder in folders.items() if digests[name] is None}
    _add_json(artifact, scratch, "tasks.json", digests)
    if origins := info.provenance.get("task_origins"):
        _add_json(artifact, scratch, "origins.json", scrub(origins))
    if files and _fits(files, limit_mb):
        known = KnownSecrets()
        for path in files:
            if not known.found_in(path.read_bytes()):
                artifact.add_file(str(path), name=path.relative_to(base).as_posix(), skip_cache=True)
    return artifact


def _task_set_name(info: RunInfo, options: Mapping[str, Any]) -> str:
    """Its folder or file; else the data set or repository that the options name; else the class that they make."""
    if info.task_set is not None:
        return info.task_set.name
    named = [str(options[key]) for key in ("dataset", "repo", "git_url", "preset") if options.get(key)]
    return named[0] if named else str(options.get("_target_") or "tasks").rpartition(".")[2]


def trajectories_artifact(run_dir: Path, run_id: str) -> wandb.Artifact | None:
    """The episodes of a run: rows, results and trajectories. Equal files give the same version, whoever logs it.

    Raises:
        OSError: A file cannot be read.
    """
    import wandb

    run = RunDir(run_dir)
    results = [path for path in (run.episodes, run.summary, run.results) if path.is_file() and not path.is_symlink()]
    trajectories = [path for path in _files(run.trajectories) if not path.name.endswith(PARTIAL)]
    if not results and not trajectories:
        return None
    left_out = {"files_left_out": len(trajectories) - MAX_FILES} if len(trajectories) > MAX_FILES else None
    artifact = wandb.Artifact(f"run-{run_id}-trajectories", type="trajectories", metadata=left_out)
    for path in results:
        artifact.add_file(str(path), name=path.name, skip_cache=True)
    for path in trajectories[:MAX_FILES]:
        # A file of one episode never changes, and is not copied; one of several grows when the run is resumed.
        policy: Literal["immutable", "mutable"] = "immutable" if path.suffix == ".json" else "mutable"
        name = path.relative_to(run_dir).as_posix()
        artifact.add_file(str(path), name=name, policy=policy, skip_cache=True)
    return artifact


def snapshots_artifact(
    summary: RunSummary, run_dir: Path, run_id: str, scratch: Path, *, limit_mb: float
) -> wandb.Artifact | None:
    """The run's snapshot store, if it lies in the run directory and is within the limit; else what is in it, and where.

    Raises:
        OSError: A file cannot be read.
    """
    import wandb

    store = summary.snapshot_dir
    kept = sum(result.snapshots for result in summary.results)
    if store is None or not kept:
        return None
    artifact = wandb.Artifact(f"run-{run_id}-snapshots", type="snapshots", metadata={"snapshots": kept})
    own = store.resolve().is_relative_to(run_dir.resolve())
    files = [*_files(store)] if own else []
    _add_json(
        artifact,
        scratch,
        "store.json",
        {
            "path": os.path.relpath(store, run_dir) if own else str(store),
            "snapshots": kept,
            # The name of an object is the digest of its content.
            "bytes_by_file": {path.relative_to(store).as_posix(): path.stat().st_size for path in files[:MAX_FILES]},
        },
    )
    if files and _fits(files, limit_mb):
        for path in files:
            name = path.relative_to(store).as_posix()
            artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
    return artifact


def code_artifact(run_id: str) -> wandb.Artifact:
    """The source files of this package, as they are.

    Raises:
        OSError: A file cannot be read.
    """
    import wandb

    import ares_exp

    artifact = wandb.Artifact(f"run-{run_id}-code", type="code")
    package = Path(ares_exp.__file__).parent
    for path in _files(package):
        if path.suffix in {".py", ".yaml", ".j2"} and "samples" not in path.parts:
            artifact.add_file(str(path), name=path.relative_to(package.parent).as_posix(), skip_cache=True)
    return artifact


def parent_artifacts(info: RunInfo) -> Iterator[wandb.Artifact]:
    """The trajectories of the runs that this one was branched from, or replays, as those runs logged them."""
    for parent in info.parents:
        recorded = read_identity(parent)
        if recorded is not None and (artifact := trajectories_artifact(parent, recorded.id)) is not None:
            yield artifact


def _add_json(artifact: wandb.Artifact, scratch: Path, name: str, data: Any) -> None:
    path = scratch / name
    path.write_text(dump_json(data, indent=1) + "\n", encoding="utf-8")
    artifact.add_file(str(path), name=name, skip_cache=True)
    path.unlink()


def _fits(files: list[Path], limit_mb: float) -> bool:
    return len(files) <= MAX_FILES and sum(path.stat().st_size for path in files) <= limit_mb * MEGABYTE


def _files(folder: Path) -> Iterator[Path]:
    """Plain files below a folder, without hidden ones, in order. Links are not followed, as they may lead anywhere."""
    if folder.is_symlink():
        return
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path
