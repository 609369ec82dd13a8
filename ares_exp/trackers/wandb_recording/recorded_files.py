"""The table of episodes and the artifacts of one session.

Online, W&B asks the service before it takes a table or an artifact. So they have a thread of their own: where the
service does not answer, the numbers still arrive on the disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ares_exp.results import EpisodeResult
from ares_exp.run_summary import RunSummary
from ares_exp.trackers.wandb_recording import artifacts
from ares_exp.trackers.wandb_recording.episodes_table import EpisodesTable
from ares_exp.trackers.wandb_recording.recording import WandbRecording
from ares_exp.trackers.wandb_recording.service import folders_of

if TYPE_CHECKING:
    import wandb

    from ares_exp.trajectories.records import EpisodeTrajectory


class RecordedFiles:
    """What the W&B run of a recording gets beside its numbers. No method raises; what goes wrong is reported."""

    def __init__(self, recording: WandbRecording) -> None:
        """Touches nothing yet."""
        self._recording = recording
        self._scratch = recording.info.run_dir / "wandb" / "scratch"
        self._table: EpisodesTable | None = None

    def begin(self) -> None:
        """Begins the table, when there is a W&B run, and logs what the run builds upon."""
        self._recording.begun.wait()
        info, options, identity = self._recording.info, self._recording.options, self._recording.identity
        with self._at_work("refused the table of episodes") as run:
            if run is not None:
                self._scratch.mkdir(parents=True, exist_ok=True)
                self._table = EpisodesTable(run, self._scratch, pages=options.log_trajectories, earlier=identity.table)
                for result in info.earlier[self._table.rows :]:  # a killed session had not logged them yet
                    self._table.add(result, None)
        if options.log_artifacts:
            with self._at_work("refused what the run builds upon") as run:
                if run is not None:
                    self._use_inputs(run)

    def add_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None) -> None:
        """Adds the row of a finished try to the table."""
        with self._at_work("refused a row of the table") as run:
            if run is not None and self._table is not None and self._table.add(result, trajectory):
                self._remember(self._table)

    def end(self, summary: RunSummary) -> None:
        """Logs what is left of the table, and what the run made."""
        with self._at_work("refused the end of the table") as run:
            if run is not None and self._table is not None and self._table.flush():
                self._remember(self._table)
        if self._recording.options.log_artifacts:
            with self._at_work("refused an artifact") as run:
                if run is not None:
                    self._log_outputs(run, summary)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _remember(self, table: EpisodesTable) -> None:
        self._recording.identity = replace(self._recording.identity, table=table.state)
        self._recording.identity.write(self._recording.info.run_dir)

    def _use_inputs(self, run: wandb.Run) -> None:
        """Task set and parents. `use_artifact` is for online runs alone; what it logs, an offline run can log too."""
        info = self._recording.info
        limit_mb = self._recording.options.task_set_limit_mb
        used = [artifacts.task_set_artifact(info, self._scratch, limit_mb=limit_mb), *artifacts.parent_artifacts(info)]
        inputs = []
        for artifact in used:
            if artifact is not None:
                run._log_artifact(artifact, use_after_commit=True)
                inputs.append({"name": artifact.name.partition(":")[0], "digest": artifact.digest})
        run.config.update({"inputs": inputs}, allow_val_change=True)  # type: ignore[no-untyped-call]

    def _log_outputs(self, run: wandb.Run, summary: RunSummary) -> None:
        run_dir, options = self._recording.info.run_dir, self._recording.options
        limit_mb = options.snapshots_limit_mb
        outputs = [
            artifacts.trajectories_artifact(run_dir, run.id),
            artifacts.snapshots_artifact(summary, run_dir, run.id, self._scratch, limit_mb=limit_mb),
            artifacts.code_artifact(run.id) if options.log_code else None,
        ]
        for artifact in outputs:
            if artifact is not None:
                run.log_artifact(artifact)

    @contextmanager
    def _at_work(self, otherwise: str) -> Iterator[wandb.Run | None]:
        """The W&B run, if it is open, with its folders in the run directory. Reports what fails."""
        recording = self._recording
        if recording.run is None:
            yield None
            return
        with recording.reported(otherwise), folders_of(recording.info, recording.identity.id):
            yield recording.run
