"""The command `wandb`: uploads what was recorded offline, and builds a workspace, with Weights & Biases."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.commands.cli.run_command import EXIT_OK, CommandParser
from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.recorded_results import added_rewards, read_results, recorded_summary
from ares_exp.records.run_dir import RunDir
from ares_exp.records.statistics.metric_estimates import added_metrics
from ares_exp.records.terminal_text import printable
from ares_exp.runs.resume.trusted_record import is_trusted
from ares_exp.trackers.wandb_files import KEY, WandbFiles, WandbInputs, scores_bytes
from ares_exp.trackers.wandb_recording import FINISHED, WALL_SEC
from ares_exp.trackers.wandb_service import WandbIdentity, close_run, first_line, no_traces, open_run, sessions

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

EXIT_NOT_ALL = 1
UPLOAD_TIMEOUT_SEC = 60.0
"""Bound on reaching the service to add to a run that was uploaded."""

DESCRIPTION = "Uploads what was recorded offline, and builds a workspace, with Weights & Biases."
EPILOG = """\
Examples:
  %(prog)s sync outputs/first                 upload a run, or the runs of a sweep
  %(prog)s dashboard --entity my-team --group ares_exp/2026-01-31_12-00-00

Exit codes: 0 done; 1 something could not be uploaded; 2 the command line or a run directory is wrong, something is
missing, or the service does not answer.
"""
SYNC = """\
Uploads the W&B runs of run directories: numbers, tables and artifacts by `wandb sync`, then the links to task sets and
parent runs, the scores of `ares-exp score`, and the files of directories that were moved. The sessions of a resumed run
become one W&B run.
"""
DASHBOARD = """\
Builds a saved view of a W&B project that shows its runs, or one group of them. Needs the package wandb-workspaces
(`pip install 'ares-exp[dashboard]'`) and WANDB_API_KEY; WANDB_BASE_URL for your own server.
"""

PLOTS = (
    ("Progress", "mean reward", FINISHED, ("progress/mean_reward",)),
    ("Progress", "finished over time", WALL_SEC, (FINISHED,)),
    ("Progress", "outcomes", FINISHED, ("outcome/completed", "outcome/truncated", "outcome/agent_error")),
    ("Episodes", "tokens", FINISHED, ("episode/prompt_tokens", "episode/generated_tokens")),
    ("Episodes", "US dollars", FINISHED, ("episode/cost",)),
    ("Runner", "event loop lag", WALL_SEC, ("system/loop_lag_sec",)),
)
"""Line plots: section, title, axis, and what is drawn."""
BARS = {
    "mean reward, errors as zero": ("stat/mean_reward", "stat/mean_reward_low", "stat/mean_reward_high"),
    "pass@1": ("stat/pass@1", "stat/pass@1_low", "stat/pass@1_high"),
    "US dollars": ("run/cost",),
}
"""Bar plots of the section `Results` by title: keys of the summary."""


def add_arguments(parser: CommandParser) -> None:
    """Declares the arguments of the command."""
    about, end = "upload the W&B runs of run directories", "Examples:\n  %(prog)s outputs/first\n"
    sync = parser.add_command("sync", _upload, about=about, description=SYNC, epilog=end)
    sync.add_argument(
        "paths", nargs="+", type=run_path, metavar="PATH", help=f"run directories, or folders of them; {MEANING}"
    )
    sync.add_argument("--again", action="store_true", help="upload what was uploaded before, too")
    about, end = "build a W&B workspace that shows a group of runs", "Examples:\n  %(prog)s --entity my-team\n"
    dashboard = parser.add_command("dashboard", _dashboard, about=about, description=DASHBOARD, epilog=end)
    dashboard.add_argument("--entity", required=True, help="W&B user or team")
    dashboard.add_argument("--project", default="ares_exp", help="W&B project (default %(default)s)")
    dashboard.add_argument("--group", help="show only the runs of this group, such as the runs of a sweep")
    dashboard.add_argument("--name", help="of the view (default: the group, or ares_exp)")


def _upload(arguments: argparse.Namespace) -> int:
    whole = True
    with no_traces() as folder:
        for run_dir in (found for path in arguments.paths for found in _run_dirs(path)):
            if not is_trusted(run_dir):  # W&B uploads whatever file its record names
                raise UserError(
                    f"Expected a run directory that only you can write, got {run_dir}: others own it or can write in "
                    "it. Copy it, and upload it from the copy."
                )
            whole &= _upload_run(run_dir, folder, again=arguments.again)
    return EXIT_OK if whole else EXIT_NOT_ALL


def _run_dirs(path: Path) -> list[Path]:
    found = [folder for folder in (path, *sorted(path.glob("*"))) if _files(folder)]
    if not found:
        raise UserError(
            f"Expected {path} to be a run directory with a W&B run (`wandb/`), or a folder of those, found none. "
            "Runs with `tracker=wandb` have one."
        )
    return found


def _files(run_dir: Path) -> list[Path]:
    """Returns the files of the sessions of a run, in their order."""
    return [file for session in sessions(run_dir) for file in session.glob("run-*.wandb")]


def _upload_run(run_dir: Path, folder: Path, *, again: bool) -> bool:
    """Uploads what the service does not have of a run; says whether it has all of it.

    Args:
        run_dir: The run directory.
        folder: Where W&B's own logs are, which are removed at the end.
        again: Whether to upload what it has, too.
    """
    shown = printable(str(run_dir))
    identity, inputs = WandbIdentity.read(run_dir), WandbInputs.read(run_dir)
    confirmed = () if identity is None else identity.confirmed
    files = [one for one in _files(run_dir) if again or not (_mark(one).exists() or one.parent.name in confirmed)]
    if files:
        _sync(files, folder)
    elif inputs is None or (inputs.linked and inputs.scores_bytes == scores_bytes(run_dir)):
        sys.stdout.write(f"{shown}: nothing to upload (--again uploads it once more)\n")
        return True
    if missing := [file for file in files if not _mark(file).exists()]:
        sys.stderr.write("".join(f"not uploaded: {printable(str(file))}\n" for file in missing))
        return False
    if identity is None or inputs is None:
        return True
    try:
        changed = _complete(run_dir, identity, inputs, folder)
    except Exception as error:  # whatever W&B raises
        sys.stderr.write(f"{shown}: its inputs were not uploaded: {printable(first_line(error))}\n")
        return False
    done = {"linked": True, "run_dir": run_dir.absolute(), "scores_bytes": scores_bytes(run_dir)}
    inputs.model_copy(update=done).write(run_dir)
    sys.stdout.write(f"{shown}: uploaded\n")
    for parent in changed:
        sys.stderr.write(
            f"{shown}: the trajectories of {printable(str(parent))}, from which it was branched, are left out: they "
            "are not there any more, or have changed\n"
        )
    return not changed


def _mark(file: Path) -> Path:
    """Returns what W&B makes beside the file of a session that was uploaded."""
    return file.with_name(f"{file.name}.synced")


def _sync(files: Sequence[Path], folder: Path) -> None:
    """Uploads sessions by `wandb sync`, in their order. Its output is for the user, but for the place of its log."""
    for file in files:
        _mark(file).unlink(missing_ok=True)
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(os.fspath, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if str(folder) not in line:
                sys.stdout.write(line)
                sys.stdout.flush()


def _complete(run_dir: Path, identity: WandbIdentity, inputs: WandbInputs, folder: Path) -> list[Path]:
    """Adds to a W&B run what `wandb sync` leaves out: links to inputs, new scores, and files of a moved directory.

    Returns:
        The parents whose trajectories are not as recorded.
    """
    summary = recorded_summary(RunDir(run_dir))
    run = open_run(identity, folder, online=True, resume="must", init_timeout=UPLOAD_TIMEOUT_SEC)
    try:
        missing = inputs.link(run, run_dir)
        if inputs.run_dir != run_dir.absolute() or inputs.scores_bytes != scores_bytes(run_dir):
            files = WandbFiles(run, run_dir, inputs)
            episodes = RunDir(run_dir).episodes
            results = read_results(episodes).results if episodes.exists() else ()
            for result in results:
                files.add(result)
            files.end(run_dir / "snapshots", sum(result.snapshots for result in results))
            run.summary.update(added_metrics(results, added_rewards(RunDir(run_dir))))
    finally:
        close_run(run, exit_code=int(summary is None or not summary.complete))
    return missing


def _dashboard(arguments: argparse.Namespace) -> int:
    if find_spec("wandb_workspaces") is None:
        raise UserError("A dashboard needs the package wandb-workspaces: `pip install 'ares-exp[dashboard]'`.")
    import wandb

    with no_traces():
        wandb.setup(settings=wandb.Settings(silent=True))
        logging.getLogger("wandb").setLevel(logging.CRITICAL)
        try:
            view = workspace(arguments.entity, arguments.project, group=arguments.group, name=arguments.name)
            view.save()  # type: ignore[no-untyped-call]
            url = str(view.url)
        except Exception as error:  # whatever W&B raises, its service is what it is about
            raise UserError(
                f"W&B did not take the view for {arguments.entity}/{arguments.project}: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}. Look at WANDB_API_KEY, WANDB_BASE_URL, the entity and the "
                "project."
            ) from None
        finally:
            wandb.teardown()
    sys.stdout.write(f"{printable(url)}\n")
    return EXIT_OK


def workspace(entity: str, project: str, *, group: str | None = None, name: str | None = None) -> Workspace:
    """Returns the view, not saved yet."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import interface as wr

    sections: dict[str, list[Any]] = {
        "Results": [
            wr.BarPlot(title=title, metrics=[wr.SummaryMetric(key) for key in keys]) for title, keys in BARS.items()
        ]
    }
    for section, title, axis, keys in PLOTS:
        sections.setdefault(section, []).append(wr.LinePlot(title=title, x=axis, y=[*keys]))
    sections["Trajectories"] = [wr.WeavePanelSummaryTable(table_name=KEY, layout=wr.Layout(w=24, h=12))]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name or group or "ares_exp",
        sections=[ws.Section(name=section, is_open=True, panels=panels) for section, panels in sections.items()],
        runset_settings=ws.RunsetSettings(
            filters=[expr.Metric("Group") == group] if group else "",
            pinned_columns=["summary:stat/mean_reward", "summary:run/cost", "summary:run/planned"],
        ),
    )
