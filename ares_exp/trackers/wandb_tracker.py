"""Weights & Biases as a tracker. W&B lives in a thread of its own, so that the run never waits for it."""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from ares_exp.results import EpisodeResult, RunSummary
from ares_exp.run_dir import RunDir
from ares_exp.secrets import scrub
from ares_exp.trackers.tracker import RunInfo

if TYPE_CHECKING:
    import wandb

Mode = Literal["auto", "offline", "online", "disabled"]
_Inbox = queue.SimpleQueue[EpisodeResult | RunSummary]
_Seconds = Annotated[float, pydantic.Field(gt=0)]

_logger = logging.getLogger(__name__)


class WandbTracker:
    """Records a run with Weights & Biases: a row per finished episode, the totals, and the run's files as an artifact.

    All files stay in the `wandb` folder of the run directory; an offline run is uploaded later with `wandb sync`.
    """

    @pydantic.validate_call
    def __init__(
        self,
        *,
        project: Annotated[str, pydantic.Field(min_length=1)] = "ares_exp",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        name: str | None = None,
        tags: tuple[str, ...] = (),
        mode: Mode = "auto",
        log_artifacts: bool = True,
        init_timeout_sec: _Seconds = 10.0,
        finish_timeout_sec: _Seconds = 30.0,
    ) -> None:
        """Keeps the settings; W&B itself is imported by `start`, in the background.

        Args:
            project: W&B project.
            entity: W&B user or team; `None` is the account's default.
            group: W&B group; `None` takes the run's (a sweep is one group).
            job_type: W&B job type; `None` takes the run's.
            name: Display name; `None` takes the run's.
            tags: Labels beside the run's own.
            mode: `auto` obeys the environment variable WANDB_MODE, else is `online` when WANDB_API_KEY is set, else
                `offline`.
            log_artifacts: Whether `episodes.jsonl` and the trajectories become an artifact of the W&B run.
            init_timeout_sec: Bound on reaching the service, after which the run is recorded offline.
            finish_timeout_sec: Bound on `finish`, uploads included; what is not uploaded by then stays on disk.
        """
        self._project = project
        self._entity = entity
        self._group = group
        self._job_type = job_type
        self._name = name
        self._tags = tags
        self._mode = mode
        self._log_artifacts = log_artifacts
        self._init_timeout_sec = init_timeout_sec
        self._finish_timeout_sec = finish_timeout_sec
        self._failures = 0
        self._inbox: _Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._environment: dict[str, str | None] = {}

    @property
    def failures(self) -> int:
        """How many times W&B failed so far."""
        return self._failures

    def start(self, run: RunInfo) -> None:
        """Begins. W&B is imported and initialised in the background."""
        mode = _effective_mode(self._mode)
        if mode == "disabled":
            return
        folder = run.run_dir / "wandb"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._report(f"cannot write in {folder}, this run is not tracked: {error.strerror}")
            return
        self._environment = _keep_files_in(folder)
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._record, args=(run, mode, self._inbox), name="tracker", daemon=True)
        self._thread.start()

    def log_episode(self, result: EpisodeResult) -> None:
        """Records a finished episode. Returns at once."""
        if self._thread is not None:
            self._inbox.put(result)

    def finish(self, summary: RunSummary) -> None:
        """Records the totals and ends the W&B run, within `finish_timeout_sec`. Idempotent."""
        if self._thread is None:
            return
        self._inbox.put(summary)
        self._thread.join(self._finish_timeout_sec)
        if self._thread.is_alive():
            self._report(f"did not finish within {self._finish_timeout_sec:g} s; what was recorded is on disk")
        else:
            _set_environment(self._environment)
        self._thread = None

    def _record(self, info: RunInfo, mode: str, inbox: _Inbox) -> None:
        """The life of the thread: opens the W&B run, logs what arrives, closes after the summary."""
        run: wandb.Run | None = None
        rows = _Rows()
        try:
            run = self._open(info, mode)
        except Exception as error:
            self._report(f"could not be started, this run is not tracked: {_first_line(error)}")
        while isinstance(item := inbox.get(), EpisodeResult):
            row = rows.add(item)
            if run is not None:
                self._log(run, row)
        if run is not None:
            self._close(run, info, item)

    def _open(self, info: RunInfo, mode: str) -> wandb.Run:
        if mode == "online":
            try:
                return self._init(info, "online")
            except Exception as error:
                self._report(
                    f"cannot be reached, recording offline in {info.run_dir / 'wandb'} instead "
                    f"(upload it later with `wandb sync`): {_first_line(error)}"
                )
                _release_run_id()
        return self._init(info, "offline")

    def _init(self, info: RunInfo, mode: Literal["online", "offline"]) -> wandb.Run:
        import wandb

        hooks = sys.exit, sys.excepthook
        # Silent for the whole process, not for the run alone: a W&B that lacks a key would else ask for one.
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            run = wandb.init(
                project=self._project,
                entity=self._entity,
                group=self._group or info.group,
                job_type=self._job_type or info.job_type,
                name=self._name or info.name,
                tags=[*dict.fromkeys((*info.tags, *self._tags))],
                id=_plain(info.run_id),
                config={**scrub(info.config), "provenance": scrub(info.provenance)},
                dir=str(info.run_dir),
                mode=mode,
                resume="allow",
                reinit="create_new",
                settings=self._settings(),
            )
        finally:
            # W&B's hooks would print a second traceback and wrap every exit.
            sys.exit, sys.excepthook = hooks
        run.define_metric("progress/finished", hidden=True)
        for prefix in ("episode/*", "outcome/*", "progress/mean_reward"):
            run.define_metric(prefix, step_metric="progress/finished")
        return run

    def _settings(self) -> wandb.Settings:
        import wandb

        return wandb.Settings(
            silent=True,
            console="off",
            init_timeout=self._init_timeout_sec,
            finish_timeout=0.9 * self._finish_timeout_sec,
            finish_timeout_raises=True,
            # The run's own provenance is free of secrets; W&B's has the bare command line and the git remote.
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            save_code=False,
        )

    def _log(self, run: wandb.Run, row: dict[str, float]) -> None:
        try:
            run.log(row)
        except Exception as error:
            self._report(f"refused a row: {_first_line(error)}")

    def _close(self, run: wandb.Run, info: RunInfo, summary: RunSummary) -> None:
        try:
            run.summary.update(_flat("run", summary.to_dict()))
            if self._log_artifacts:
                _log_files(run, RunDir(info.run_dir))
        except Exception as error:
            self._report(f"refused the summary or the artifact: {_first_line(error)}")
        try:
            run.finish(exit_code=0 if summary.complete else 1)
        except Exception as error:
            self._report(f"could not finish the run, what was recorded is on disk: {_first_line(error)}")

    def _report(self, what: str) -> None:
        """Counts a failure; the first is a warning, the others are for the debug log."""
        self._failures += 1
        _logger.log(logging.WARNING if self._failures == 1 else logging.DEBUG, "W&B %s", what)


class _Rows:
    """Turns finished episodes into rows with running totals."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._scored = 0

    def add(self, result: EpisodeResult) -> dict[str, float]:
        """The row of one more finished episode; what is not known is left out, never 0."""
        self._outcomes[result.outcome.value] += 1
        row = {
            "episode/num_steps": result.num_steps,
            "episode/duration_sec": result.duration_sec,
            "episode/prompt_tokens": result.prompt_tokens,
            "episode/generated_tokens": result.generated_tokens,
            "episode/cost": result.cost,
            "progress/finished": self._outcomes.total(),
            **{f"outcome/{outcome}": count for outcome, count in self._outcomes.items()},
        }
        if result.reward is not None:
            self._reward_sum += result.reward
            self._scored += 1
            row["episode/reward"] = result.reward
            row["progress/mean_reward"] = self._reward_sum / self._scored
        return row


def _effective_mode(mode: Mode) -> str:
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked in {"offline", "online", "disabled"}:
        return asked
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


def _keep_files_in(folder: Path) -> dict[str, str | None]:
    """Points W&B's own folders below `folder`; returns what to give to `_set_environment` to undo it."""
    return _set_environment(
        {
            "WANDB_DATA_DIR": str(folder),
            "WANDB_CACHE_DIR": str(folder / "cache"),
            # Else an offline run, too, calls home.
            "WANDB_ERROR_REPORTING": os.environ.get("WANDB_ERROR_REPORTING", "false"),
        }
    )


def _set_environment(values: dict[str, str | None]) -> dict[str, str | None]:
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _release_run_id() -> None:
    """Ends W&B's service process, which keeps the id of a run that could not be opened for itself."""
    import wandb

    wandb.teardown()


def _log_files(run: wandb.Run, run_dir: RunDir) -> None:
    """Logs the episodes and the trajectories as an artifact; the trajectories, which never change, are not copied."""
    import wandb

    artifact = wandb.Artifact(f"episodes-{run.id}", type="episodes")
    if run_dir.episodes.exists():
        artifact.add_file(str(run_dir.episodes), skip_cache=True)
    for path in sorted(run_dir.trajectories.rglob("*.json*")):
        name = str(path.relative_to(run_dir.path))
        artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return dict(_flat_items(prefix, values))


def _flat_items(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat_items(f"{prefix}/{key}", value)
        else:
            yield f"{prefix}/{key}", value


def _plain(name: str) -> str:
    """`name` with what W&B does not take in a run id or an artifact's name replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
