"""The dashboard shows what the tracker logs, and is saved where the service is reachable."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from ares_exp.commands.wandb import BARS, CHARTS
from ares_exp.records.results import RunSummary
from ares_exp.runs.control.runner_monitor import RunnerMonitor
from ares_exp.trackers.wandb_run import KEY
from tests.unit.trackers.tracked_run import RESULTS, patient_tracker, run_info
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS, ServedRun, WandbService
from tests.warm_start import warm_command

pytestmark = LEAVES_FOLDERS


def dashboard(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a separate process: W&B reads its settings once."""
    command = [*warm_command(), "wandb", "dashboard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_panel_shows_logged_keys(service: WandbService, tmp_path: Path) -> None:
    tracker = patient_tracker()

    async def watch() -> None:
        async with RunnerMonitor(list, tracker.log_system, print):
            pass

    tracker.start(run_info(tmp_path))
    for result in RESULTS:
        tracker.log_episode(result)
    asyncio.run(watch())
    tracker.finish(RunSummary(3, RESULTS))
    recorded = ServedRun(service)
    logged = {key for row in recorded.history for key in row}
    drawn = {key for keys in CHARTS.values() for key in keys}
    assert {key for key in drawn if not key.startswith("outcome/")} - logged == set()
    assert {key for keys in BARS.values() for key in keys} - set(recorded.summary) == set()
    assert KEY in recorded.summary


@pytest.mark.once
@pytest.mark.nightly
def test_view_of_a_group_is_saved(service: WandbService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = dashboard("--entity", "me", "--group", "a/sweep")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{service.url}/me/ares_exp")
    assert not (tmp_path / "wandb").exists()
    (view,) = service.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("me", "ares_exp", "a/sweep")
    spec = json.loads(view["spec"])["section"]
    names = [one["name"] for one in spec["panelBankConfig"]["sections"]]
    assert names == ["Results", "Charts", "Trajectories"]
    assert "a/sweep" in json.dumps(spec["runSets"])
    assert "stat/mean_reward_low" in view["spec"]


@pytest.mark.once
@pytest.mark.parametrize(("key", "cause"), [("", "WANDB_API_KEY"), ("0" * 40, "W&B rejected the view for me/ares_exp")])
def test_rejected_view_gives_a_one_line_error(
    key: str, cause: str, service: WandbService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.mood = "refusing"
    monkeypatch.setenv("WANDB_API_KEY", key)
    done = dashboard("--entity", "me")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert cause in done.stderr
