"""The W&B artifacts of a run and their lineage: task set -> run -> trajectories -> branch run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.records.secrets import KnownSecrets, scrub
from ares_exp.tasks.task_files import content_digest, content_of, digested_files
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.upload_record import Parent, Prepared, UploadRecord
from ares_exp.trackers.wandb_identity import plain, read_identity

if TYPE_CHECKING:
    import wandb

MEGABYTE = 10**6
MAX_FILES = 50_000
"""Of a task set or a snapshot store with more files the artifact has a listing alone."""


def prepare_task_set(info: RunInfo, folder: Path, *, limit_mb: float) -> Prepared | None:
    """Copies what the artifact of a run's tasks gets into a folder; returns `None` where the tasks are not known.

    It gets the names and digests of all tasks, and the commits of those from git repositories. Of tasks in a folder it
    gets the files, too, up to the limit, but for those that hold the value of a secret.

    Raises:
        OSError: A task cannot be read, or the folder cannot be written.
    """
    if not info.tasks:
        return None
    root = info.task_set or Path()
    is_task = (root / TASK_TOML).exists()
    base = root.parent if is_task else root
    folders = {name: base / name for name in info.tasks if info.task_set and (base / name / TASK_TOML).is_file()}
    bounds = {name: LinkBounds.of(task, None if is_task else base) for name, task in folders.items()}
    files = [task / path for name, task in folders.items() for path in digested_files(bounds[name])]
    options = scrub(info.config.get("env") or {})
    digests = {name: content_of(info.task_digests.get(name)) for name in sorted(info.tasks)}
    digests |= {name: content_digest(bounds[name]) for name in folders if digests[name] is None}
    _write_json(folder / "tasks.json", digests)
    if origins := info.provenance.get("task_origins"):
        _write_json(folder / "origins.json", scrub(origins))
    if _fits(files, limit_mb):
        known = KnownSecrets()
        for path in files:
            if not known.found_in(path.read_bytes()):
                _copy(path, folder / path.relative_to(base))
    name = plain(f"task-set-{_task_set_name(info, options)}")
    return Prepared(name=name, type="task-set", metadata={"tasks": len(info.tasks), "env": options})


def prepare_code(run_id: str, folder: Path) -> Prepared:
    """Copies the source files of this package into a folder.

    Raises:
        OSError: One cannot be read, or the folder cannot be written.
    """
    import ares_exp

    package = Path(ares_exp.__file__).parent
    for path in _files(package):
        if path.suffix in {".py", ".yaml", ".j2"} and "samples" not in path.parts:
            _copy(path, folder / path.relative_to(package.parent))
    return Prepared(name=f"run-{run_id}-code", type="code")


def prepared_artifact(prepared: Prepared, folder: Path) -> wandb.Artifact:
    """Returns the artifact that was prepared in a folder.

    Raises:
        OSError: A file cannot be read.
    """
    files = ((path, path.relative_to(folder)) for path in _files(folder, hidden=True))
    return _artifact(plain(prepared.name), prepared.type, files, prepared.metadata)


def trajectories_artifact(run_dir: Path, run_id: str) -> wandb.Artifact | None:
    """Returns the episodes of a run: rows, results and trajectories. Equal files give the same version.

    Raises:
        OSError: A file cannot be read.
    """
    run = RunDir(run_dir)
    results = [path for path in (run.episodes, run.summary, run.results) if path.is_file() and not path.is_symlink()]
    trajectories = list(_files(run.trajectories))
    if not results and not trajectories:
        return None
    files = ((path, path.relative_to(run_dir)) for path in (*results, *trajectories))
    return _artifact(f"run-{run_id}-trajectories", "trajectories", files)


def parents_of(info: RunInfo) -> Iterator[tuple[Parent, wandb.Artifact]]:
    """Yields the runs that this one was branched from, or replays, with the trajectories as those runs logged them.

    Raises:
        OSError: A file of theirs cannot be read.
    """
    for path in info.parents:
        recorded = read_identity(path)
        if recorded is not None and (artifact := trajectories_artifact(path, recorded.id)) is not None:
            yield Parent(path=path, digest=artifact.digest), artifact


def parent_artifact(parent: Parent) -> wandb.Artifact | None:
    """Returns the trajectories of a parent; `None` where they are not there any more, or have changed.

    The record of a parent may come from a stranger: only who has its files knows the digest.

    Raises:
        OSError: A file cannot be read.
    """
    recorded = read_identity(parent.path)
    artifact = None if recorded is None else trajectories_artifact(parent.path, recorded.id)
    return artifact if artifact is not None and artifact.digest == parent.digest else None


def report_artifact(report: Path, run_id: str) -> wandb.Artifact:
    """Returns the report of a run. Raises `OSError` if it cannot be read."""
    return _artifact(f"run-{run_id}-report", "report", [(report, Path(report.name))])


def snapshots_artifact(record: UploadRecord, run_dir: Path, run_id: str) -> wandb.Artifact | None:
    """Returns the run's snapshot store, if it lies in the run directory and is within the limit; else its listing.

    Raises:
        OSError: A file cannot be read.
    """
    store = record.snapshot_dir
    if store is None or not record.snapshots:
        return None
    store = run_dir / store
    own = store.resolve().is_relative_to(run_dir.resolve())
    files = [*_files(store)] if own else []
    listing = run_dir / "wandb" / "store.json"
    _write_json(
        listing,
        {
            "path": str(record.snapshot_dir),
            "snapshots": record.snapshots,
            # The name of an object is the digest of its content.
            "bytes_by_file": {path.relative_to(store).as_posix(): path.stat().st_size for path in files[:MAX_FILES]},
        },
    )
    kept = files if _fits(files, record.snapshots_limit_mb) else []
    names = ((listing, Path(listing.name)), *((path, path.relative_to(store)) for path in kept))
    return _artifact(f"run-{run_id}-snapshots", "snapshots", names, {"snapshots": record.snapshots})


def _artifact(
    name: str, kind: str, files: Iterable[tuple[Path, Path]], metadata: Mapping[str, Any] | None = None
) -> wandb.Artifact:
    import wandb

    artifact = wandb.Artifact(name, type=kind, metadata=dict(metadata or {}))
    for path, inside in files:
        # Immutable: W&B uploads the file itself, and makes no copy before.
        artifact.add_file(str(path), name=inside.as_posix(), policy="immutable", skip_cache=True)
    return artifact


def _task_set_name(info: RunInfo, options: Mapping[str, Any]) -> str:
    """Returns the name of its folder or file; else of its data set or repository; else of the class that makes it."""
    if info.task_set is not None:
        return info.task_set.name
    named = [str(options[key]) for key in ("dataset", "repo", "git_url", "preset") if options.get(key)]
    return named[0] if named else str(options.get("_target_") or "tasks").rpartition(".")[2]


def _write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_json(data, indent=1) + "\n", encoding="utf-8")


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _fits(files: list[Path], limit_mb: float) -> bool:
    return len(files) <= MAX_FILES and sum(path.stat().st_size for path in files) <= limit_mb * MEGABYTE


def _files(folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """Yields the plain files below a folder, in order. Links are not followed, as they may lead anywhere."""
    if folder.is_symlink():
        return
    skipped = () if hidden else (".", "__pycache__")
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(skipped))
        for name in sorted(names):
            path = Path(directory, name)
            if not name.startswith(skipped) and path.is_file() and not path.is_symlink():
                yield path
