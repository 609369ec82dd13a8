"""The command `wandb`: uploads what was recorded offline, and builds a workspace, with Weights & Biases."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.commands.cli.run_command import EXIT_OK, CommandParser
from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.recorded_results import read_results
from ares_exp.records.recorded_summary import recorded_summary
from ares_exp.records.run_dir import RunDir
from ares_exp.records.terminal_text import printable
from ares_exp.runs.resume.trusted_record import is_trusted
from ares_exp.trackers.wandb_files import WandbFiles, WandbInputs
from ares_exp.trackers.wandb_recording import FINISHED, WALL_SEC
from ares_exp.trackers.wandb_service import (
    UPLOAD_TIMEOUT_SEC,
    WandbIdentity,
    close_run,
    first_line,
    no_traces,
    open_run,
    read_identity,
    sessions,
)

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

EXIT_NOT_ALL = 1
SYNCED = ".synced"
"""W&B appends it to the name of a session's file for its mark that the session was uploaded."""

DESCRIPTION = "Uploads what was recorded offline, and builds a workspace, with Weights & Biases."
EPILOG = """\
Examples:
  %(prog)s sync outputs/first                 upload a run that was recorded offline
  %(prog)s dashboard --entity my-team --project ares_exp

`%(prog)s COMMAND --help` lists the options of each command.
"""
SYNC = """\
Uploads the W&B runs of run directories: numbers, tables and artifacts by `wandb sync`, then the links to task sets and
parent runs, and the files of directories that were moved. The sessions of a resumed run become one W&B run.
"""
SYNC_EXAMPLES = """\
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/sweep         all runs of a sweep
  %(prog)s outputs/first --again

Exit codes: 0 all is uploaded; 1 something could not be; 2 the command line or a run directory is wrong.
"""
DASHBOARD = """\
Builds a saved view of a W&B project that shows its runs, or one group of them: rewards with their intervals, progress
against tries and against time, outcomes, costs, the table of episodes with readable trajectories, and the runner.
"""
DASHBOARD_EXAMPLES = """\
Examples:
  %(prog)s --entity my-team --project ares_exp
  %(prog)s --entity my-team --group ares_exp/2026-01-31_12-00-00

Needs the package wandb-workspaces (`pip install 'ares-exp[dashboard]'`) and WANDB_API_KEY; WANDB_BASE_URL for
your own server. Exit codes: 0 done; 2 something is missing, or the service does not answer.
"""

LINES: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Progress": {
        "mean reward so far": (FINISHED, ("progress/mean_reward",)),
        "mean reward over time": (WALL_SEC, ("progress/mean_reward",)),
        "finished over time": (WALL_SEC, (FINISHED,)),
        "outcomes": (
            FINISHED,
            ("outcome/completed", "outcome/truncated", "outcome/agent_error", "outcome/policy_error"),
        ),
    },
    "Episodes": {
        "reward": (FINISHED, ("episode/reward",)),
        "steps": (FINISHED, ("episode/num_steps",)),
        "seconds": (FINISHED, ("episode/duration_sec",)),
        "tokens": (FINISHED, ("episode/prompt_tokens", "episode/generated_tokens")),
        "US dollars": (FINISHED, ("episode/cost",)),
    },
    "Runner": {
        "event loop lag": (WALL_SEC, ("system/loop_lag_sec",)),
        "containers and queue": (WALL_SEC, ("system/containers", "system/queue")),
        "memory": (WALL_SEC, ("system/rss_mb",)),
    },
}
"""Line plots by section and title: the axis, and what is drawn."""

BARS: Mapping[str, tuple[str, ...]] = {
    "mean reward, errors as zero": ("stat/mean_reward", "stat/mean_reward_low", "stat/mean_reward_high"),
    "pass@1": ("stat/pass@1", "stat/pass@1_low", "stat/pass@1_high"),
    "US dollars": ("run/cost",),
    "flaky tasks": ("stat/flaky_tasks",),
}
"""Bar plots of the section `Results` by title: keys of the summary."""

TABLE = "episodes"


def add_arguments(parser: CommandParser) -> None:
    """Declares the arguments of the command."""
    sync = parser.add_command(
        "sync", _upload, about="upload the W&B runs of run directories", description=SYNC, epilog=SYNC_EXAMPLES
    )
    sync.add_argument(
        "paths", nargs="+", type=run_path, metavar="PATH", help=f"run directories, or folders of them; {MEANING}"
    )
    sync.add_argument("--again", action="store_true", help="upload what was uploaded before, too")
    dashboard = parser.add_command(
        "dashboard",
        _dashboard,
        about="build a W&B workspace that shows a group of runs",
        description=DASHBOARD,
        epilog=DASHBOARD_EXAMPLES,
    )
    dashboard.add_argument("--entity", required=True, help="W&B user or team")
    dashboard.add_argument("--project", default="ares_exp", help="W&B project (default %(default)s)")
    dashboard.add_argument("--group", help="show only the runs of this group, such as the runs of a sweep")
    dashboard.add_argument("--name", help="of the view (default: the group, or ares_exp)")


def _upload(arguments: argparse.Namespace) -> int:
    run_dirs = {found: _files(found) for path in arguments.paths for found in _run_dirs(path)}
    for run_dir in run_dirs:
        if not is_trusted(run_dir):  # W&B uploads whatever file its record names
            raise UserError(
                f"Expected a run directory that only you can write, got {run_dir}: others own it or can write in it. "
                "Copy it, and upload it from the copy."
            )
    whole = True
    with no_traces() as folder:
        owed = {run_dir: _owed(run_dir, files, again=arguments.again) for run_dir, files in run_dirs.items()}
        missing = _sync([file for files in owed.values() for file in files], folder)
        for file in missing:
            sys.stderr.write(f"not uploaded: {printable(str(file))}\n")
        for run_dir, files in owed.items():
            identity, inputs = read_identity(run_dir), WandbInputs.read(run_dir)
            if identity is not None and inputs is not None and missing.isdisjoint(files):
                if files or not inputs.linked:
                    whole &= _complete(run_dir, identity, inputs, folder)
                else:
                    sys.stdout.write(f"{printable(str(run_dir))}: nothing to upload (--again uploads it once more)\n")
    return EXIT_OK if whole and not missing else EXIT_NOT_ALL


def _run_dirs(path: Path) -> list[Path]:
    if _files(path):
        return [path]
    found = [folder for folder in sorted(path.glob("*")) if _files(folder)] if path.is_dir() else []
    if not found:
        raise UserError(
            f"Expected {path} to be a run directory with a W&B run (`wandb/`), or a folder of those, found none. "
            "Runs with `tracker=wandb` have one."
        )
    return found


def _files(run_dir: Path) -> list[Path]:
    """Returns the files of the sessions of a run, in their order."""
    return [file for session in sessions(run_dir) for file in session.glob("run-*.wandb")]


def _owed(run_dir: Path, files: Sequence[Path], *, again: bool) -> list[Path]:
    """Returns the files of the sessions that the service does not have."""
    identity = read_identity(run_dir)
    confirmed = () if identity is None else identity.confirmed
    return [one for one in files if again or not (_mark(one).exists() or one.parent.name in confirmed)]


def _sync(files: Sequence[Path], folder: Path) -> set[Path]:
    """Uploads sessions by `wandb sync`; returns those of which it does not say that they were uploaded.

    Args:
        files: Their files.
        folder: Where W&B's own logs are, which are removed at the end.
    """
    if files:
        for file in files:
            _mark(file).unlink(missing_ok=True)
        sys.stdout.flush()
        # Its output is for the user, but for the place of its log. It uploads the sessions of a W&B run in their order.
        command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(os.fspath, files)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if str(folder) not in line:
                    sys.stdout.write(line)
                    sys.stdout.flush()
    return {file for file in files if not _mark(file).exists()}


def _complete(run_dir: Path, identity: WandbIdentity, inputs: WandbInputs, folder: Path) -> bool:
    """Adds to a W&B run what `wandb sync` leaves out: links to inputs, and files of a directory that was moved."""
    shown = printable(str(run_dir))
    missing: list[Path] = []
    summary = recorded_summary(RunDir(run_dir))
    exit_code = int(summary is None or not summary.complete)
    try:
        run = open_run(identity, folder, online=True, resume="must", init_timeout=UPLOAD_TIMEOUT_SEC)
        try:
            missing = inputs.link(run, run_dir)
            if inputs.run_dir != run_dir.absolute():
                files = WandbFiles(run, run_dir, inputs)
                episodes = RunDir(run_dir).episodes
                results = read_results(episodes).results if episodes.exists() else ()
                for result in results:
                    files.add(result)
                files.end(run_dir / "snapshots", sum(result.snapshots for result in results))
        finally:
            close_run(run, exit_code=exit_code)
    except Exception as error:  # whatever W&B raises
        sys.stderr.write(f"{shown}: its inputs were not uploaded: {printable(first_line(error))}\n")
        return False
    inputs.model_copy(update={"linked": True, "run_dir": run_dir.absolute()}).write(run_dir)
    sys.stdout.write(f"{shown}: uploaded\n")
    for parent in missing:
        sys.stderr.write(
            f"{shown}: the trajectories of {printable(str(parent))}, from which it was branched, are left out: they "
            "are not there any more, or have changed\n"
        )
    return not missing


def _mark(file: Path) -> Path:
    return file.with_name(file.name + SYNCED)


def _dashboard(arguments: argparse.Namespace) -> int:
    if find_spec("wandb_workspaces") is None:
        raise UserError("A dashboard needs the package wandb-workspaces: `pip install 'ares-exp[dashboard]'`.")
    with no_traces():
        url = _save(arguments)
    sys.stdout.write(f"{printable(url)}\n")
    return EXIT_OK


def _save(arguments: argparse.Namespace) -> str:
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    logging.getLogger("wandb").setLevel(logging.CRITICAL)
    try:
        view = workspace(arguments.entity, arguments.project, group=arguments.group, name=arguments.name)
        view.save()  # type: ignore[no-untyped-call]
        return str(view.url)
    except Exception as error:  # whatever W&B raises, its service is what it is about
        raise UserError(
            f"W&B did not take the view for {arguments.entity}/{arguments.project}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Look at WANDB_API_KEY, WANDB_BASE_URL, the entity and the project."
        ) from None
    finally:
        wandb.teardown()


def workspace(entity: str, project: str, *, group: str | None = None, name: str | None = None) -> Workspace:
    """Returns the view, not saved yet."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import interface as wr

    bars: list[Any] = [
        wr.BarPlot(title=title, metrics=[wr.SummaryMetric(key) for key in keys]) for title, keys in BARS.items()
    ]
    table = wr.WeavePanelSummaryTable(table_name=TABLE, layout=wr.Layout(w=24, h=12))
    lines = [
        ws.Section(
            name=section,
            is_open=section != "Runner",
            panels=[wr.LinePlot(title=title, x=axis, y=[*keys]) for title, (axis, keys) in plots.items()],
        )
        for section, plots in LINES.items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name or group or "ares_exp",
        sections=[
            ws.Section(name="Results", is_open=True, panels=bars),
            *lines,
            ws.Section(name="Trajectories", is_open=True, panels=[table]),
        ],
        runset_settings=ws.RunsetSettings(
            filters=[expr.Metric("Group") == group] if group else "",
            pinned_columns=["summary:stat/mean_reward", "summary:run/cost", "summary:run/planned"],
        ),
    )
