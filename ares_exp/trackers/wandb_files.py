"""The table of episodes and the artifacts of a W&B run: task set -> run -> trajectories -> branch run.

`wandb sync` uploads the table and the artifacts of an offline run from the files that they were logged from. Inputs
need a connection: an offline run only records them (`wandb/inputs.json`), and `ares-exp wandb sync` adds the links.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_dir import RUN_FILES, RunDir, dump_json, is_run
from ares_exp.records.secrets import KnownSecrets, mask_known_secrets, scrub
from ares_exp.tasks.task_files import content_digest, content_of, digested_files
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.trackers.tracker import RunInfo
from ares_exp.trackers.wandb_service import WandbRecord, plain, read_identity

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

KEY, REPORT = "episodes", "report"
COLUMNS = (
    "episode_id", "task", "attempt", "retry", "reward", "rewards", "outcome", "error", "num_steps", "prompt_tokens",
    "generated_tokens", "cost", "duration_sec", "trajectory",
)  # fmt: skip
MAX_ERROR = 1000
MAX_PAGES_BYTES = 128 * 2**20
"""Further episodes have no page; their trajectories are in the artifact all the same."""
MAX_REPORT_BYTES = 10 * 10**6
"""W&B loads it whole, over the network."""
MEGABYTE = 10**6
MAX_FILES = 50_000
"""Of a task set or a snapshot store with more files the artifact has a listing alone."""
LOGGED_AT_ONCE = 64
"""So many episodes of an offline run are logged each for itself; W&B shows the last 100 parts of a table."""


class Parent(pydantic.BaseModel, frozen=True):
    """The directory of a run that this one was branched from, or replays, and the digest of its trajectories."""

    path: Path
    digest: str


class WandbInputs(WandbRecord, frozen=True):
    """What a W&B run builds upon, and the settings of its files.

    Attributes:
        run_dir: The run directory when the run was recorded: W&B notes the files of artifacts by absolute paths.
        task_set: Name of the artifact whose files are in the folder `wandb/task-set`; `None` without one.
        metadata: Its metadata in W&B.
        linked: Whether the service has the links to task set and parents.
        scores_bytes: Size of the scores of `ares-exp score` that the service has.
    """

    FILE = "inputs.json"
    run_dir: Path
    log_artifacts: bool = True
    log_trajectories: bool = True
    snapshots_limit_mb: float = 100.0
    task_set: str | None = None
    metadata: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    linked: bool = False
    scores_bytes: int = 0

    def link(self, run: wandb.Run, run_dir: Path) -> list[Path]:
        """Makes the inputs those of an online W&B run; returns the parents whose trajectories are not as recorded.

        The record of a parent may come from a stranger: only who has its files knows the digest.
        """
        if self.task_set is not None:
            run.use_artifact(_task_set_artifact(self, run_dir))
        missing = []
        for parent in self.parents:
            artifact = _trajectories_artifact(parent.path)
            if artifact is None or artifact.digest != parent.digest:
                missing.append(parent.path)
            else:
                run.use_artifact(artifact)
        return missing


class WandbFiles:
    """The table and the artifacts of one session of a W&B run. A failure raises what W&B raises."""

    def __init__(self, run: wandb.Run, run_dir: Path, settings: WandbInputs) -> None:
        """Starts the table anew: it has the rows of earlier sessions, too, if they are added."""
        import wandb

        self._run = run
        self._run_dir = run_dir
        self._settings = settings
        self._pages = run_dir / "wandb" / "pages"
        self._pages_bytes = sum(path.stat().st_size for path in self._pages.glob("*.html"))
        self._finished: list[str] = []
        self._logged = 0
        self._table = wandb.Table(columns=[*COLUMNS], log_mode="INCREMENTAL")
        if run.resumed:
            run.summary.update({KEY: None})

    def add(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Adds the row of a finished episode, and logs the new rows if there are enough.

        Offline, each episode is logged at once, up to a number of them: nothing can be logged after a kill.
        """
        if trajectory is not None and self._settings.log_trajectories and self._pages_bytes < MAX_PAGES_BYTES:
            from ares_exp.reports.written_report import episode_page

            page = episode_page(trajectory).encode()
            self._pages.mkdir(parents=True, exist_ok=True)
            self._page(result.episode_id).write_bytes(page)
            self._pages_bytes += len(page)
        self._table.add_data(*self._row(result))
        self._finished.append(result.episode_id)
        waiting = len(self._finished) - self._logged
        few = max(self._logged - LOGGED_AT_ONCE, 0) // 8 if self._run.offline else self._logged // 2
        if waiting > few:
            self.flush()
            if self._run.offline and self._settings.log_artifacts:
                self._log(_trajectories_artifact(self._run_dir, {*self._finished}))

    def flush(self) -> None:
        """Logs the rows of the table that were not logged."""
        if len(self._finished) > self._logged:
            self._run.log({KEY: self._table})
            self._logged = len(self._finished)

    def end(self, snapshot_dir: Path | None, snapshots: int) -> None:
        """Logs the rest of the table, and what the run made: trajectories, snapshots and the report."""
        import wandb

        self.flush()
        if self._settings.log_artifacts:
            self._log(_trajectories_artifact(self._run_dir))
            if snapshot_dir is not None and snapshots:
                self._log(self._snapshots(snapshot_dir, snapshots))
        if not is_run(self._run_dir):
            return
        from ares_exp.reports.written_report import Subject, write_report

        out = self._run_dir / "wandb" / "report.html"
        which = "all" if self._settings.log_trajectories else "none"
        write_report(Subject.of_run(self._run_dir), out, max_bytes=MAX_REPORT_BYTES, which=which)
        self._run.log({REPORT: wandb.Html(str(out), inject=False)})
        if self._settings.log_artifacts:
            self._log(_artifact(f"run-{self._run.id}-report", "report", [(out, Path(out.name))]))

    def log_code(self) -> None:
        """Logs the source files of this package."""
        import ares_exp

        package = Path(ares_exp.__file__).parent
        sources = (path for path in _files(package) if path.suffix in {".py", ".yaml", ".j2"})
        files = [(path, path.relative_to(package.parent)) for path in sources if "samples" not in path.parts]
        self._log(_artifact(f"run-{self._run.id}-code", "code", files))

    def _log(self, artifact: wandb.Artifact | None) -> None:
        if artifact is not None:
            self._run.log_artifact(artifact)

    def _row(self, result: EpisodeResult) -> list[Any]:
        import wandb

        error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
        page = self._page(result.episode_id)
        values = {name: getattr(result, name, None) for name in COLUMNS} | {
            "task": result.task_name,
            "rewards": json.dumps(dict(result.rewards)),
            "outcome": result.outcome.value,
            "error": mask_known_secrets(error)[:MAX_ERROR],
            "trajectory": wandb.Html(str(page), inject=False) if page.is_file() and not page.is_symlink() else None,
        }
        return [values[name] for name in COLUMNS]

    def _page(self, episode_id: str) -> Path:
        return self._pages / f"{sha256(episode_id.encode(errors='surrogatepass')).hexdigest()[:32]}.html"

    def _snapshots(self, store: Path, snapshots: int) -> wandb.Artifact:
        """The snapshot store, if it lies in the run directory and is within the limit; else its listing."""
        own = store.resolve().is_relative_to(self._run_dir.resolve())
        files = [*_files(store)] if own else []
        shown = os.path.relpath(store.resolve(), self._run_dir.resolve()) if own else str(store)
        # The name of an object is the digest of its content.
        sizes = {path.relative_to(store).as_posix(): path.stat().st_size for path in files[:MAX_FILES]}
        told = {"path": shown, "snapshots": snapshots, "bytes_by_file": sizes}
        listing = _write_json(self._run_dir / "wandb" / "store.json", told)
        kept = files if _fits(files, self._settings.snapshots_limit_mb) else []
        names = ((listing, Path(listing.name)), *((path, path.relative_to(store)) for path in kept))
        return _artifact(f"run-{self._run.id}-snapshots", "snapshots", names, {"snapshots": snapshots})


def record_inputs(run: wandb.Run, info: RunInfo, settings: WandbInputs, *, limit_mb: float) -> WandbInputs:
    """Writes the inputs of a run into its directory, and names them in the W&B run's config."""
    used = []
    if settings.log_artifacts:
        if info.tasks:
            settings = settings.model_copy(update=_prepare_task_set(info, limit_mb))
            used.append(_task_set_artifact(settings, info.run_dir))
        found = {path: artifact for path in info.parents if (artifact := _trajectories_artifact(path)) is not None}
        parents = tuple(Parent(path=path, digest=artifact.digest) for path, artifact in found.items())
        settings = settings.model_copy(update={"parents": parents})
        used += found.values()
    settings.write(info.run_dir)
    if used:
        named = [{"name": one.name.partition(":")[0], "digest": one.digest} for one in used]
        run.config.update({"inputs": named}, allow_val_change=True)  # type: ignore[no-untyped-call]
    return settings


def _prepare_task_set(info: RunInfo, limit_mb: float) -> dict[str, Any]:
    """Copies what the artifact of a run's tasks gets into `wandb/task-set`; returns its name and metadata.

    It gets the names and digests of all tasks, and the commits of those from git repositories. Of tasks in a folder it
    gets the files, too, up to the limit, but for those that hold the value of a secret.
    """
    folder = info.run_dir / "wandb" / "task-set"
    shutil.rmtree(folder, ignore_errors=True)
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
                copy = folder / path.relative_to(base)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    # The name of its folder or file; else of its data set or repository; else of the class that makes it.
    named = [str(options[key]) for key in ("dataset", "repo", "git_url", "preset") if options.get(key)]
    name = root.name if info.task_set else named[0] if named else str(options.get("_target_") or "tasks")
    name = name if info.task_set or named else name.rpartition(".")[2]
    return {"task_set": plain(f"task-set-{name}"), "metadata": {"tasks": len(info.tasks), "env": options}}


def _task_set_artifact(inputs: WandbInputs, run_dir: Path) -> wandb.Artifact:
    folder = run_dir / "wandb" / "task-set"
    files = ((path, path.relative_to(folder)) for path in _files(folder, hidden=True))
    return _artifact(plain(inputs.task_set or ""), "task-set", files, inputs.metadata)


def scores_bytes(run_dir: Path) -> int:
    """Returns the size of the scores that `ares-exp score` added to a run: they only grow."""
    return sum(path.stat().st_size for path in _files(RunDir(run_dir).scores))


def _trajectories_artifact(run_dir: Path, finished: set[str] | None = None) -> wandb.Artifact | None:
    """Returns the episodes of a run, or of those that have finished. Equal files give the same version."""
    run, recorded = RunDir(run_dir), read_identity(run_dir)
    shared = [run.episodes, run.summary, run.results, *(run_dir / name for name in RUN_FILES)]
    results = [path for path in shared if path.is_file() and not path.is_symlink()]
    own = [path for path in _files(run.trajectories) if finished is None or path.name.partition(".json")[0] in finished]
    files = [(path, path.relative_to(run_dir)) for path in (*results, *_files(run.scores), *own)]
    return (
        None if recorded is None or not files else _artifact(f"run-{recorded.id}-trajectories", "trajectories", files)
    )


def _artifact(
    name: str, kind: str, files: Iterable[tuple[Path, Path]], metadata: Mapping[str, Any] | None = None
) -> wandb.Artifact:
    import wandb

    artifact = wandb.Artifact(name, type=kind, metadata=dict(metadata or {}))
    for path, inside in files:
        # A file that a resumed run goes on with is copied, of the others W&B uploads the file itself.
        grows = ".jsonl" in path.suffixes or len(inside.parts) == 1
        policy = "mutable" if grows else "immutable"
        artifact.add_file(str(path), name=inside.as_posix(), policy=policy, skip_cache=True)  # type: ignore[arg-type]
    return artifact


def _write_json(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_json(data, indent=1) + "\n", encoding="utf-8")
    return path


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
