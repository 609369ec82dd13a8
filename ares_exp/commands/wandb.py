"""The command `wandb`: uploads locally recorded W&B runs to Weights & Biases, and creates a W&B workspace for them."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ares_exp.commands.cli.run_command import CommandParser
from ares_exp.errors import UserError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.recorded_results import added_rewards, read_results, recorded_summary
from ares_exp.records.run_dir import RunDir
from ares_exp.records.terminal_text import printable
from ares_exp.runs.resume.recorded_run import is_trusted
from ares_exp.trackers.metrics import added_metrics
from ares_exp.trackers.tracker import error_line
from ares_exp.trackers.wandb_run import (
    KEY,
    WandbFiles,
    WandbRecord,
    close_run,
    no_traces,
    open_run,
    scores_bytes,
    sessions,
    uploaded_mark,
)
from ares_exp.trackers.wandb_tracker import FINISHED, WALL_SEC

UPLOAD_TIMEOUT_SEC = 60.0  # time limit for reaching the service to extend an uploaded run

HELP = """\
Uploads runs that were recorded offline to Weights & Biases (W&B), or creates a W&B workspace.
[arguments]
Examples:
  %(prog)s sync outputs/first                 upload a run, or the runs of a sweep
  %(prog)s dashboard --entity my-team --group ares_exp/2026-01-31_12-00-00

Exit codes: 0 done; 1 something could not be uploaded; 2 the command line or a run directory is wrong, a package or
a key is missing, or the service does not respond.
"""
SYNC = """\
Uploads the W&B runs of run directories: numbers, tables and artifacts with `wandb sync`, then the links to task sets
and parent runs, the scores of `ares-exp score`, and the files of runs that were killed or moved. The sessions of a
resumed run become one W&B run.
[arguments]
Examples:
  %(prog)s outputs/first
"""
DASHBOARD = """\
Saves a view of a W&B project that shows its runs, or the runs of one group. Needs the package wandb-workspaces
(`pip install 'ares-exp[dashboard]'`) and WANDB_API_KEY. Set WANDB_BASE_URL for your own server.
[arguments]
Examples:
  %(prog)s --entity my-team
"""

CHARTS = {
    "mean reward": (FINISHED, "progress/mean_reward"),
    "finished over time": (WALL_SEC, FINISHED),
    "outcomes": (FINISHED, "outcome/completed", "outcome/truncated", "outcome/agent_error"),
    "tokens": (FINISHED, "episode/prompt_tokens", "episode/generated_tokens"),
    "US dollars": (FINISHED, "episode/cost"),
    "event loop lag": (WALL_SEC, "system/loop_lag_sec"),
}
"""Line plots of the workspace by title. Each has the metric of its x-axis, followed by the plotted metrics."""
BARS = {
    "mean reward, errors as zero": ("stat/mean_reward", "stat/mean_reward_low", "stat/mean_reward_high"),
    "pass@1": ("stat/pass@1", "stat/pass@1_low", "stat/pass@1_high"),
    "US dollars": ("run/cost",),
}
"""Bar plots of the workspace by title, each with the plotted keys of the W&B summary."""


def add_arguments(parser: CommandParser) -> None:
    sync = parser.add_command("sync", _upload, "upload the W&B runs of run directories", SYNC)
    sync.add_argument("paths", nargs="+", type=run_path, metavar="PATH", help=f"runs, or folders of runs; {MEANING}")
    sync.add_argument("--again", action="store_true", help="upload again, even if a run was uploaded before")
    dashboard = parser.add_command(
        "dashboard", _dashboard, "create a W&B workspace that shows a group of runs", DASHBOARD
    )
    dashboard.add_argument("--entity", required=True, help="W&B user or team")
    dashboard.add_argument("--project", default="ares_exp", help="W&B project (default %(default)s)")
    dashboard.add_argument("--group", help="show only the runs of this group, such as the runs of a sweep")
    dashboard.add_argument("--name", help="name of the view (default: the group, or ares_exp)")


def _upload(arguments: argparse.Namespace) -> int:
    uploaded = True
    with no_traces() as folder:
        for run_dir in (found for path in arguments.paths for found in _run_dirs(path)):
            if not is_trusted(run_dir):  # W&B uploads every file that the record names
                raise UserError(
                    f"Expected a run directory that only you can write to, got {run_dir}: it belongs to another user, "
                    "or other users can write to it. Copy it, and upload the copy."
                )
            uploaded &= _upload_run(run_dir, folder, again=arguments.again)
    return exit_codes.COMPLETE if uploaded else exit_codes.INCOMPLETE


def _run_dirs(path: Path) -> list[Path]:
    found = [folder for folder in (path, *sorted(path.glob("*"))) if _files(folder)]
    if not found:
        raise UserError(
            f"There is no W&B run (`wandb/`) in {path}, which must be a run directory or a folder of run directories. "
            "Set `tracker=wandb` to record a W&B run."
        )
    return found


def _files(run_dir: Path) -> list[Path]:
    """Returns the files `run-*.wandb` with the W&B records of a run's sessions, in order."""
    return [file for session in sessions(run_dir) for file in session.glob("run-*.wandb")]


def _upload_run(run_dir: Path, folder: Path, *, again: bool) -> bool:
    """Uploads a run's missing records to W&B, or all records if `again` is set. Returns whether the upload is complete.

    `folder` is a temporary folder for W&B's logs.
    """
    shown, record = printable(str(run_dir)), WandbRecord.read(run_dir)
    files = [file for file in _files(run_dir) if again or not uploaded_mark(file).exists()]
    if files:
        _sync(files, folder)
    elif record is None or (record.linked and record.logged_in and record.scores_bytes == scores_bytes(run_dir)):
        sys.stdout.write(f"{shown}: already uploaded (use --again to upload it again)\n")
        return True
    missing = [file for file in files if not uploaded_mark(file).exists()]
    if missing or record is None:
        sys.stderr.write("".join(f"not uploaded: {printable(str(file))}\n" for file in missing))
        return not missing
    try:
        changed = _complete(run_dir, record, folder)
    except Exception as error:  # W&B can raise any exception
        sys.stderr.write(f"{shown}: its inputs were not uploaded: {printable(error_line(error))}\n")
        return False
    sys.stdout.write(f"{shown}: uploaded\n")
    for parent in changed:
        sys.stderr.write(f"{shown}: the trajectories of its parent {printable(str(parent))} are missing or changed\n")
    return not changed


def _sync(files: Sequence[Path], folder: Path) -> None:
    """Uploads the record files with `wandb sync`, in order. Prints its output, except for lines about its log."""
    for file in files:
        uploaded_mark(file).unlink(missing_ok=True)
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(os.fspath, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if str(folder) not in line:
                sys.stdout.write(line)


def _complete(run_dir: Path, record: WandbRecord, folder: Path) -> list[Path]:
    """Completes a run in W&B after the upload of its records: links it to its parent runs.

    If the run was killed, moved or scored again, also uploads its files and scores. Returns the parents that could not
    be linked, because their trajectories are missing or have changed.
    """
    summary = recorded_summary(RunDir(run_dir))
    run = open_run(record, folder, mode="online", settings={"init_timeout": UPLOAD_TIMEOUT_SEC}, resume="must")
    try:
        files = WandbFiles(run, run_dir, record)
        missing = files.link_inputs()
        scored = scores_bytes(run_dir)
        if record.logged_in != run_dir.absolute() or record.scores_bytes != scored:
            episodes = RunDir(run_dir).episodes
            results = read_results(episodes).results if episodes.exists() else ()
            for result in results:
                files.add(result)
            files.end(run_dir / "snapshots", results)
            run.summary.update(added_metrics(results, added_rewards(RunDir(run_dir))))
    finally:
        close_run(run, exit_code=int(summary is None or not summary.complete))
    record.write(run_dir, linked=True, logged_in=run_dir.absolute(), scores_bytes=scored)
    return missing


def _dashboard(arguments: argparse.Namespace) -> None:
    if find_spec("wandb_workspaces") is None:
        raise UserError("A dashboard needs the package wandb-workspaces: `pip install 'ares-exp[dashboard]'`.")
    import wandb
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import interface as wr

    sections: dict[str, list[Any]] = {
        "Results": [wr.BarPlot(title=title, metrics=[*map(wr.SummaryMetric, keys)]) for title, keys in BARS.items()],
        "Charts": [wr.LinePlot(title=title, x=axis, y=[*keys]) for title, (axis, *keys) in CHARTS.items()],
        "Trajectories": [wr.WeavePanelSummaryTable(table_name=KEY, layout=wr.Layout(w=24, h=12))],
    }
    with no_traces():
        wandb.setup(settings=wandb.Settings(silent=True))
        logging.getLogger("wandb").setLevel(logging.CRITICAL)
        try:
            view = ws.Workspace(
                entity=arguments.entity,
                project=arguments.project,
                name=arguments.name or arguments.group or "ares_exp",
                sections=[ws.Section(name=name, is_open=True, panels=panels) for name, panels in sections.items()],
                runset_settings=ws.RunsetSettings(
                    filters=[expr.Metric("Group") == arguments.group] if arguments.group else "",
                    pinned_columns=["summary:stat/mean_reward", "summary:run/cost", "summary:run/planned"],
                ),
            )
            view.save()  # type: ignore[no-untyped-call]
            url = str(view.url)
        except Exception as error:  # W&B can raise any exception
            raise UserError(
                f"W&B rejected the view for {arguments.entity}/{arguments.project}: {error_line(error)}. "
                "Check WANDB_API_KEY, WANDB_BASE_URL, the entity and the project."
            ) from None
        finally:
            wandb.teardown()
    sys.stdout.write(f"{printable(url)}\n")
