"""A W&B run: its record and its sessions, its table of episodes, and its artifacts.

All files of W&B stay in the run directory.

In the lineage graph of W&B, the task set is an input of the run, and the trajectories are its output. A branch has the
trajectories of its parent as an input. W&B can link a run to inputs only online. An offline run records its inputs, and
`ares-exp wandb sync` adds the links later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pydantic

from ares_exp.containers.ownership import short_lived_directory
from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_dir import (
    RUN_FILES,
    RunDir,
    dump_json,
    is_plain_file,
    is_run,
    plain_files,
    read_json_object,
    write_atomically,
)
from ares_exp.records.secrets import KnownSecrets, mask_known_secrets, scrub
from ares_exp.tasks.task_files import content_of, digested_files
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.verification.link_bounds import LinkBounds
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory

SWEEP_VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")  # set by the agent of a W&B sweep
SETTINGS: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "finish_timeout_raises": True,
    "x_transaction_log_flush_interval": 0.1,  # seconds until a row is on disk; a killed run loses only newer rows
    # Unlike the run's provenance, W&B's contains the unmasked command line and git remote.
    "x_disable_meta": True,
    "x_disable_stats": True,  # W&B's monitor is a process that leaves a socket in the temporary directory
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
}

# W&B's service process and its environment variables are shared by all threads of this process.
_one_user_at_a_time = threading.Lock()
_open_runs: set[str] = set()  # ids of the W&B runs that `open_run` has opened and that are still open


class WandbRecord(pydantic.BaseModel, frozen=True):
    """The content of `wandb/run.json` in a run directory, which `ares-exp wandb sync` and resumed runs need.

    Attributes:
        task_set: Name of the artifact whose files are in the folder `wandb/task-set`; `None` without a task set.
        parents: Digests of the parents' trajectories, by run directory.
        linked: Whether the W&B run is linked to its task set and parents on the service.
        logged_in: Path of the run directory when its files were logged, at the end of the run or by a later sync;
            `None` before. W&B stores absolute paths, so a directory that was moved must be logged again.
        scores_bytes: Size in bytes of the uploaded scores of `ares-exp score`.
    """

    id: str = pydantic.Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    project: str
    entity: str | None = None
    log_artifacts: bool = True
    snapshots_limit_mb: float = 100.0
    task_set: str | None = None
    parents: Mapping[Path, str] = pydantic.Field(default_factory=dict)
    linked: bool = False
    logged_in: Path | None = None
    scores_bytes: int = 0

    @classmethod
    def of(cls, info: RunInfo, settings: Mapping[str, Any]) -> Self:
        """Returns the record for a new session.

        A resumed run continues the W&B run of its earlier sessions. If a W&B sweep started the process, the session
        belongs to the W&B run of the sweep. Otherwise, the session belongs to a new W&B run.
        """
        # A Hydra sweep can run several jobs in this process, but the agent of a W&B sweep expects one run.
        wanted = sweep_run_id() if info.group is None else None
        earlier = cls.read(info.run_dir) if info.resumed else None
        known = earlier.model_dump(include={"project", "entity", "id"}) if earlier else {}
        return cls(**{"id": plain(wanted or info.run_id), **settings, **known})

    def write(self, run_dir: Path, **changes: Any) -> Self:
        """Writes the record to a run directory, after changing the fields in `changes`. Returns the changed record."""
        changed = self.model_copy(update=changes)
        write_atomically(run_dir / "wandb" / "run.json", changed.model_dump_json(indent=2) + "\n")
        return changed

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Reads the record of a run directory; `None` if it is missing. Raises `ConfigError` if it is broken."""
        path = run_dir / "wandb" / "run.json"
        try:
            return cls.model_validate(read_json_object(path, max_bytes=2**24)) if path.exists() else None
        except (OSError, pydantic.ValidationError) as error:
            raise ConfigError(f"Cannot read {path}: {error}") from None


def plain(name: str) -> str:
    """Replaces the characters of `name` that W&B rejects in a run id or the name of an artifact."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def sweep_run_id() -> str | None:
    """Returns the run id that the agent of a W&B sweep chose for this process; `None` if no sweep started it."""
    return os.environ.get("WANDB_RUN_ID") or None if os.environ.get("WANDB_SWEEP_ID") else None


def open_run(record: WandbRecord, run_dir: Path, *, mode: str, settings: dict[str, Any], **more: Any) -> wandb.Run:
    """Opens a session of a W&B run, whose files are in `run_dir`. If W&B fails, removes the files of the session.

    Args:
        record: The W&B run to open.
        run_dir: The run directory.
        mode: `online`, `offline`, or `auto`, which is `online` if W&B finds a key.
        settings: Additional settings of W&B.
        more: Additional arguments of `wandb.init`.
    """
    import wandb

    # Makes W&B silent in the whole process, not only for the run, because it prompts for a missing key.
    wandb.setup(settings=wandb.Settings(silent=True))
    before = sessions(run_dir)
    try:
        if mode == "auto":  # if the user has opened a W&B run in this process, W&B is already logged in
            mode = "online" if wandb.run is not None or wandb.login(verify=False, prompt=False) else "offline"
        run = wandb.init(
            project=record.project,
            entity=record.entity,
            id=record.id,
            dir=str(run_dir),
            mode="offline" if mode == "offline" else "online",
            reinit="create_new",
            settings=wandb.Settings(**SETTINGS, **settings),
            # Also makes `wandb sync` append the offline record of a resumed run to the earlier upload.
            **{"resume": "allow", **more},
        )
    except BaseException:
        _end_service()
        for session in {*sessions(run_dir)} - {*before}:  # the record in such a folder marks the run as ended
            shutil.rmtree(session, ignore_errors=True)
        raise
    _open_runs.add(run.id)
    return run


def close_run(run: wandb.Run, *, exit_code: int) -> None:
    """Finishes a W&B run. Ends W&B's service process unless another run in this process uses it."""
    _open_runs.discard(run.id)
    run.finish(exit_code=exit_code)
    _end_service()


def _end_service() -> None:
    import wandb

    if not _open_runs and wandb.run is None:
        wandb.teardown()


def sessions(run_dir: Path) -> list[Path]:
    """Returns the folders in which W&B recorded the sessions of a run, in order of their start."""
    found = [path for path in (run_dir / "wandb").glob("*run-*") if not path.is_symlink()]
    return sorted(found, key=lambda path: path.name.removeprefix("offline-"))


def uploaded_mark(file: Path) -> Path:
    """Returns the path of the marker that `wandb sync` or an online tracker creates after it has uploaded `file`."""
    return file.with_name(f"{file.name}.synced")


@contextlib.contextmanager
def folders_in(folder: Path, run_id: str, *more: str) -> Iterator[None]:
    """Sets environment variables so that W&B uses `folder` for its caches and logs while the context is open.

    Other threads wait for the context, because environment variables are shared. If a W&B sweep has set its variables
    for a run other than `run_id`, these variables are removed, because W&B would otherwise use the run of the sweep.
    `more` names additional variables to set to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden = () if run_id == sweep_run_id() else SWEEP_VARIABLES
    values = dict.fromkeys(("WANDB_DATA_DIR", *more), str(folder.absolute()))
    values["WANDB_CACHE_DIR"] = str(folder.absolute() / "cache")
    # Otherwise even an offline run sends error reports.
    values["WANDB_ERROR_REPORTING"] = os.environ.get("WANDB_ERROR_REPORTING", "false")
    with _one_user_at_a_time:
        before = {name: os.environ.pop(name, None) for name in (*values, *hidden)}
        os.environ.update(values)
        try:
            yield
        finally:
            for name in before:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def no_traces() -> Iterator[Path]:
    """Makes W&B write logs and caches to a temporary folder, and yields this folder.

    The folder is removed when the context ends or, if the process is killed, by a later process.
    """
    directory = short_lived_directory("wandb")
    try:
        with folders_in(directory.path, "", "WANDB_DIR", "TMPDIR"):
            yield directory.path
    finally:
        directory.remove()


KEY = "episodes"
COLUMNS = (
    "episode_id", "task", "attempt", "retry", "reward", "rewards", "outcome", "error", "num_steps", "prompt_tokens",
    "generated_tokens", "cost", "duration_sec", "trajectory",
)  # fmt: skip
MAX_PAGES_BYTES = 128 * 2**20  # further episodes have no page; their trajectories are still in the artifact
MAX_REPORT_BYTES = 10 * 10**6  # W&B loads it in one piece, over the network
MAX_FILES = 50_000  # with more files, the artifact of a task set or snapshot store only lists them
LOGGED_AT_ONCE = 64  # episodes of an offline run are logged one by one; W&B shows the last 100 parts of a table


class WandbFiles:
    """The table and the artifacts of one session of a W&B run. Exceptions of W&B propagate to the caller."""

    def __init__(self, run: wandb.Run, run_dir: Path, record: WandbRecord) -> None:
        """Creates an empty table, which replaces the table of earlier sessions when it is logged."""
        import wandb

        self._run = run
        self._run_dir = run_dir
        self._record = record
        self._pages = run_dir / "wandb" / "pages"
        self._pages_bytes = sum(path.stat().st_size for path in self._pages.glob("*.html"))
        self._finished: list[str] = []
        self._logged = 0
        self._table = wandb.Table(columns=[*COLUMNS], log_mode="INCREMENTAL")

    def start(self, info: RunInfo, *, limit_mb: float) -> None:
        """Adds the results of earlier sessions to the table, and records the run's inputs: its task set and parents.

        If the W&B run is online, also links it to these inputs. `limit_mb` is the maximum size of the task set.
        """
        for result in info.earlier:
            self.add(result)
        if self._record.log_artifacts:
            found = {path: artifact for path in info.parents if (artifact := _trajectories_artifact(path)) is not None}
            parents = {path: artifact.digest for path, artifact in found.items()}
            task_set = _prepare_task_set(info, limit_mb) if info.tasks else None
            self._record = self._record.write(self._run_dir, parents=parents, task_set=task_set)
            used = [*self._task_sets(), *found.values()]
            named = [{"name": one.name.partition(":")[0], "digest": one.digest} for one in used]
            self._run.config.update({"inputs": named}, allow_val_change=True)  # type: ignore[no-untyped-call]
        if not self._run.offline:
            self.link_inputs()
            self._record = self._record.write(self._run_dir, linked=True)

    def link_inputs(self) -> list[Path]:
        """Links an online W&B run to its inputs. Returns the parents whose trajectories are missing or have changed.

        A parent is linked only if its files match the recorded digest. Otherwise, a run directory from an untrusted
        person could name another folder of this machine as a parent, and the files in it would be uploaded.
        """
        for task_set in self._task_sets():
            self._run.use_artifact(task_set)
        missing = []
        for parent, digest in self._record.parents.items():
            artifact = _trajectories_artifact(parent)
            if artifact is None or artifact.digest != digest:
                missing.append(parent)
            else:
                self._run.use_artifact(artifact)
        return missing

    def add(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None = None) -> None:
        """Adds the row of a finished episode to the table. Logs the table if enough rows are new.

        If the run is offline, the first 64 rows are logged one by one, because a killed run loses rows that are not
        logged.
        """
        name = sha256(result.episode_id.encode(errors="surrogatepass")).hexdigest()[:32]
        path = self._pages / f"{name}.html"
        if trajectory is not None and self._pages_bytes < MAX_PAGES_BYTES:
            from ares_exp.reports.written_report import episode_page

            page = episode_page(trajectory).encode()
            self._pages.mkdir(parents=True, exist_ok=True)
            path.write_bytes(page)
            self._pages_bytes += len(page)
        self._table.add_data(*_row(result, path))
        self._finished.append(result.episode_id)
        few = max(self._logged - LOGGED_AT_ONCE, 0) // 8 if self._run.offline else self._logged // 2
        if len(self._finished) - self._logged > few:
            self.flush()
            if self._run.offline and self._record.log_artifacts:
                self._log_trajectories({*self._finished})

    def flush(self) -> None:
        """Logs the table if it has rows that have not been logged."""
        if len(self._finished) > self._logged:
            if self._run.resumed and not self._logged:
                self._run.summary.update({KEY: None})
            self._run.log({KEY: self._table})
            self._logged = len(self._finished)

    def end(self, snapshot_dir: Path | None, results: Iterable[EpisodeResult]) -> None:
        """Logs the remaining rows of the table, and the trajectories, the snapshots and the report of the run."""
        import wandb

        from ares_exp.reports.written_report import Subject, write_report

        self.flush()
        if self._record.log_artifacts:
            self._log_trajectories()
            if snapshot_dir is not None and (snapshots := sum(result.snapshots for result in results)):
                self._log_snapshots(snapshot_dir, snapshots)
        if is_run(self._run_dir):
            out = self._run_dir / "wandb" / "report.html"
            which = "all" if self._pages.is_dir() else "none"
            write_report(Subject.of_run(self._run_dir), out, max_bytes=MAX_REPORT_BYTES, which=which)
            self._run.log({"report": wandb.Html(str(out), inject=False)})
            if self._record.log_artifacts:
                self._run.log_artifact(_artifact(f"run-{self._run.id}-report", "report", [out], out.parent))
        self._record.write(self._run_dir, logged_in=self._run_dir.absolute())

    def log_code(self) -> None:
        """Logs the source files of this package as an artifact."""
        package, kinds = Path(__file__).parents[1], (".py", ".yaml", ".j2")
        self._run.log_code(str(package), f"run-{self._run.id}-code", lambda name: name.endswith(kinds))

    def _task_sets(self) -> list[wandb.Artifact]:
        folder, name = self._run_dir / "wandb" / "task-set", self._record.task_set
        return [] if name is None else [_artifact(plain(name), "task-set", plain_files(folder), folder)]

    def _log_trajectories(self, finished: set[str] | None = None) -> None:
        if (artifact := _trajectories_artifact(self._run_dir, finished)) is not None:
            self._run.log_artifact(artifact)

    def _log_snapshots(self, store: Path, snapshots: int) -> None:
        """Logs an artifact with a list of the files in the snapshot store.

        The artifact also contains the files if the store is in the run directory, and is not too large.
        """
        files = _files(store) if store.resolve().is_relative_to(self._run_dir.resolve()) else []
        # The name of an object is the digest of its content.
        sizes = {path.relative_to(store).as_posix(): path.stat().st_size for path in files[:MAX_FILES]}
        where = os.path.relpath(store.resolve(), self._run_dir.resolve())
        contents = {"path": where, "snapshots": snapshots, "bytes_by_file": sizes}
        listing = _write_json(self._run_dir / "wandb" / "store.json", contents)
        kept = files if _fits(files, self._record.snapshots_limit_mb) else []
        artifact = _artifact(f"run-{self._run.id}-snapshots", "snapshots", kept, store)
        artifact.add_file(str(listing), skip_cache=True)
        self._run.log_artifact(artifact)


def _row(result: EpisodeResult, page: Path) -> list[Any]:
    import wandb

    error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
    values = {name: getattr(result, name, None) for name in COLUMNS} | {
        "task": result.task_name,
        "rewards": json.dumps(dict(result.rewards)),
        "outcome": result.outcome.value,
        "error": mask_known_secrets(error)[:1000],
        "trajectory": wandb.Html(str(page), inject=False) if is_plain_file(page) else None,
    }
    return [values[name] for name in COLUMNS]


def _prepare_task_set(info: RunInfo, limit_mb: float) -> str:
    """Writes the files of the task set's artifact to the folder `wandb/task-set`. Returns the name of the artifact.

    The artifact contains the digests of the tasks and, if they do not exceed `limit_mb`, copies of the files of local
    tasks. Files that contain the value of a secret are skipped.
    """
    folder = info.run_dir / "wandb" / "task-set"
    shutil.rmtree(folder, ignore_errors=True)
    root = info.task_set or Path()
    is_task = (root / TASK_TOML).exists()
    base = root.parent if is_task else root
    names = [name for name in info.tasks if info.task_set and (base / name / TASK_TOML).is_file()]
    tasks = [(name, LinkBounds.of(base / name, None if is_task else base)) for name in names]
    files = {f"{name}/{path}": task.root / path for name, task in tasks for path in digested_files(task)}
    options = scrub(info.config.get("env") or {})
    _write_json(folder / "tasks.json", {name: content_of(info.task_digests.get(name)) for name in sorted(info.tasks)})
    if origins := info.provenance.get("task_origins"):
        _write_json(folder / "origins.json", scrub(origins))
    known = KnownSecrets()
    for inside, path in files.items() if _fits([*files.values()], limit_mb) else ():
        if not known.found_in(path.read_bytes()):
            copy = folder / inside
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    # The name is that of the folder or file, of the data set or repository, or of the class of the source.
    named = (str(options[key]) for key in ("dataset", "repo", "git_url", "preset") if options.get(key))
    made_by = str(options.get("_target_") or "tasks").rpartition(".")[2]
    name = root.name if info.task_set else next(named, made_by)
    return plain(f"task-set-{name}")


def scores_bytes(run_dir: Path) -> int:
    """Returns the size in bytes of the scores that `ares-exp score` added to a run. Later scores increase it."""
    return sum(path.stat().st_size for path in _files(RunDir(run_dir).scores))


def _trajectories_artifact(run_dir: Path, finished: set[str] | None = None) -> wandb.Artifact | None:
    """Returns an artifact with the episodes of a run; `None` if the run has no episodes, or was not recorded with W&B.

    If `finished` is not `None`, the artifact contains only the trajectories with these episode ids.
    """
    run, record = RunDir(run_dir), WandbRecord.read(run_dir)
    shared = [run.episodes, run.summary, run.results, *(run_dir / name for name in RUN_FILES)]
    files = [path for path in shared if is_plain_file(path)] + _files(run.scores)
    own = _files(run.trajectories)
    files += [path for path in own if finished is None or path.name.partition(".json")[0] in finished]
    if record is None or not files:
        return None
    return _artifact(f"run-{record.id}-trajectories", "trajectories", files, run_dir)


def _artifact(name: str, kind: str, files: Iterable[Path], root: Path) -> wandb.Artifact:
    """Returns an artifact that contains `files`, named by their paths below `root`."""
    import wandb

    artifact = wandb.Artifact(name, type=kind)
    for path in files:
        # W&B copies a file that a resumed run appends to, and uploads the other files themselves.
        policy = "mutable" if ".jsonl" in path.suffixes or path.parent == root else "immutable"
        inside = path.relative_to(root).as_posix()
        artifact.add_file(str(path), name=inside, policy=policy, skip_cache=True)  # type: ignore[arg-type]
    return artifact


def _write_json(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_json(data, indent=1) + "\n", encoding="utf-8")
    return path


def _fits(files: list[Path], limit_mb: float) -> bool:
    return len(files) <= MAX_FILES and sum(path.stat().st_size for path in files) <= limit_mb * 10**6


def _files(folder: Path) -> list[Path]:
    """Returns the regular files below a folder, sorted. Ignores hidden files and the caches of Python."""
    skipped = (".", "__pycache__")
    return [
        path
        for path in plain_files(folder)
        if not any(one.startswith(skipped) for one in path.relative_to(folder).parts)
    ]
