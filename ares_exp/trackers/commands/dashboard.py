"""Builds a W&B workspace for a group of runs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ares_exp.errors import UserError
from ares_exp.terminal.terminal import printable
from ares_exp.trackers.wandb_recording.recording import FINISHED, WALL_SEC
from ares_exp.trackers.wandb_recording.service import no_traces

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

EXIT_OK = 0

DESCRIPTION = """\
Builds a saved view of a W&B project that shows its runs, or one group of them: rewards with their intervals, progress
against tries and against time, outcomes, costs, the table of episodes with readable trajectories, and the runner.
"""
EPILOG = """\
Examples:
  %(prog)s --entity my-team --project ares_exp
  %(prog)s --entity my-team --group ares_exp/2026-01-31_12-00-00

Needs the package wandb-workspaces (`pip install 'ares-exp[dashboard]'`) and WANDB_API_KEY; WANDB_BASE_URL for a server
of your own. Exit codes: 0 done; 2 something is missing, or the service does not answer.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", default="ares_exp", help="W&B project (default %(default)s)")
    parser.add_argument("--group", help="show the runs of this group alone, such as those of a sweep")
    parser.add_argument("--name", help="of the view (default: the group, or ares_exp)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
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
