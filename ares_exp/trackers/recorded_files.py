"""The table of episodes and the artifacts of one session.

Online, W&B asks the service before it takes a table or an artifact. So they have a thread of their own: where the
service does not answer, the numbers still arrive on the disk. Offline they are only recorded, for `wandb sync`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers import wandb_artifacts as artifacts
from ares_exp.trackers.run_files import RunFiles
from ares_exp.trackers.upload_record import UploadRecord, pages_of, prepared_folder
from ares_exp.trackers.wandb_recording import WandbRecording
from ares_exp.trackers.wandb_service import first_line, folders_of

if TYPE_CHECKING:
    from ares_exp.trajectories.records import EpisodeTrajectory


class RecordedFiles:
    """The table and the artifacts of one session. No method raises; failures are reported.

    Attributes:
        are_logged: Whether the W&B run has all of it: false before the end, offline, and after a failure.
    """

    def __init__(self, recording: WandbRecording) -> None:
        """Prepares for the files of a recording.

        Args:
            recording: The session whose files they are.
        """
        self.are_logged = False
        self._recording = recording
        self._run_dir = recording.info.run_dir
        self._pages = pages_of(self._run_dir)
        self._record = UploadRecord(
            log_artifacts=recording.options.log_artifacts,
            log_trajectories=recording.options.log_trajectories,
            snapshots_limit_mb=recording.options.snapshots_limit_mb,
        )
        self._files: RunFiles | None = None
        self._failed = False

    def start(self) -> None:
        """Records what the run builds upon; logs it, and the rows of earlier sessions, where the W&B run is online."""
        self._recording.started.wait()
        run = self._recording.run
        if run is None:
            return
        with self._at_work("cannot record what the run builds upon"):
            self._record = self._prepared() if self._record.log_artifacts else self._record
            self._record.write(self._run_dir)
        if not run.offline:
            self._files = RunFiles(run, self._run_dir, self._pages)
            with self._at_work("refused the table of episodes"):
                self._files.log_rows(self._recording.info.earlier)
            with self._at_work("refused what the run builds upon"):
                self._files.log_inputs(self._record)

    def add_episode(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None) -> None:
        """Adds the row of a finished attempt or retry to the table."""
        if self._recording.run is None:
            return
        with self._at_work("refused a row of the table"):
            if trajectory is not None and self._recording.options.log_trajectories:
                self._pages.add(result.episode_id, trajectory)
            if self._files is not None:
                self._files.log_rows((result,))

    def end(self, summary: RunSummary) -> None:
        """Logs the rest of the table, and what the run made."""
        if self._recording.run is None:
            return
        with self._at_work("cannot record what the run made"):
            store, run_dir = summary.snapshot_dir, self._run_dir.resolve()
            if store is not None and store.resolve().is_relative_to(run_dir):
                store = store.resolve().relative_to(run_dir)  # the run directory may be moved before it is uploaded
            kept = sum(result.snapshots for result in summary.results)
            ended = {"snapshot_dir": store, "snapshots": kept, "exit_code": 0 if summary.complete else 1}
            self._record = self._record.model_copy(update=ended)
            self._record.write(self._run_dir)
        if self._files is not None:
            with self._at_work("refused the end of the table"):
                self._files.table.flush()
            with self._at_work("refused an artifact"):
                self._files.log_outputs(self._record)
            with self._at_work("refused the report"):
                self._files.log_report(self._record)
            self.are_logged = not self._failed

    def _prepared(self) -> UploadRecord:
        """Puts the inputs and the code into the run directory, and names the inputs in the W&B run's config."""
        recording, options = self._recording, self._recording.options
        assert recording.run is not None
        prepared, inputs = [], []
        task_set, code = (prepared_folder(self._run_dir, kind) for kind in ("task-set", "code"))
        for folder in (task_set, code):
            shutil.rmtree(folder, ignore_errors=True)
        if tasks := artifacts.prepare_task_set(recording.info, task_set, limit_mb=options.task_set_limit_mb):
            prepared.append(tasks)
            inputs.append(artifacts.prepared_artifact(tasks, task_set))
        if options.log_code:
            prepared.append(artifacts.prepare_code(recording.identity.id, code))
        parents = dict(artifacts.parents_of(recording.info))
        inputs += parents.values()
        named = [{"name": artifact.name.partition(":")[0], "digest": artifact.digest} for artifact in inputs]
        recording.run.config.update({"inputs": named}, allow_val_change=True)  # type: ignore[no-untyped-call]
        return self._record.model_copy(update={"prepared": tuple(prepared), "parents": tuple(parents)})

    @contextmanager
    def _at_work(self, otherwise: str) -> Iterator[None]:
        """Has W&B's folders in the run directory. Reports what fails."""
        try:
            with folders_of(self._recording.info.run_dir, self._recording.identity.id):
                yield
        except Exception as error:
            self._failed = True
            self._recording.report(f"{otherwise}: {first_line(error)}")
