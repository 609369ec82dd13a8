"""The table of episodes and the artifacts of an online W&B run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.records.results import EpisodeResult
from ares_exp.records.run_dir import is_run
from ares_exp.trackers import wandb_artifacts as artifacts
from ares_exp.trackers.episodes_table import EpisodePages, EpisodesTable
from ares_exp.trackers.upload_record import UploadRecord, prepared_folder, report_of

if TYPE_CHECKING:
    import wandb

REPORT = "report"
MAX_REPORT_BYTES = 10 * 10**6
"""W&B loads it whole, over the network."""


class RunFiles:
    """The table and the artifacts of an online W&B run. A failure raises what W&B raises."""

    def __init__(self, run: wandb.Run, run_dir: Path, pages: EpisodePages) -> None:
        """Opens the table.

        Args:
            run: The W&B run.
            run_dir: The run directory.
            pages: The pages of its trajectories.
        """
        self._run = run
        self._run_dir = run_dir
        self.table = EpisodesTable(run, pages)

    def log_inputs(self, record: UploadRecord) -> list[Path]:
        """Logs what the run builds upon, and its code; returns the parents whose trajectories are not as recorded."""
        for prepared in record.prepared:
            artifact = artifacts.prepared_artifact(prepared, prepared_folder(self._run_dir, prepared.type))
            if prepared.type == "task-set":
                self._run.use_artifact(artifact)
            else:
                self._run.log_artifact(artifact)
        missing = []
        for parent in record.parents:
            if (trajectories := artifacts.parent_artifact(parent)) is None:
                missing.append(parent.path)
            else:
                self._run.use_artifact(trajectories)
        return missing

    def log_outputs(self, record: UploadRecord) -> None:
        """Logs trajectories and snapshots."""
        if record.log_artifacts:
            outputs: Iterable[wandb.Artifact | None] = (
                artifacts.trajectories_artifact(self._run_dir, self._run.id),
                artifacts.snapshots_artifact(record, self._run_dir, self._run.id),
            )
            for artifact in outputs:
                if artifact is not None:
                    self._run.log_artifact(artifact)

    def log_report(self, record: UploadRecord) -> None:
        """Logs the report of a run that recorded episodes, as a page to look at and as an artifact."""
        import wandb

        if not is_run(self._run_dir):
            return
        from ares_exp.reports.written_report import Subject, write_report

        out = report_of(self._run_dir)
        which = "all" if record.log_trajectories else "none"
        write_report(Subject.of_run(self._run_dir), out, max_bytes=MAX_REPORT_BYTES, which=which)
        self._run.log({REPORT: wandb.Html(str(out), inject=False)})
        if record.log_artifacts:
            self._run.log_artifact(artifacts.report_artifact(out, self._run.id))

    def log_rows(self, results: Iterable[EpisodeResult]) -> None:
        """Adds the rows of finished episodes to the table."""
        self.table.add(*results)
