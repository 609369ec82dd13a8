"""The W&B tracker against the real W&B, as a part of a process that has other things to do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
import yaml
from hydra.utils import instantiate

from ares_exp.records.run_summary import RunSummary
from ares_exp.trackers.tracker import Tracker
from ares_exp.trackers.wandb_tracker import MAX_WAITING, WandbTracker
from tests.closed_port import closed_port
from tests.leaks import processes
from tests.unit.trackers.tracked_run import RESULTS, SECRET, patient_tracker, run_info, write_results
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS, ServedRun, WandbService

CONF = Path(__file__).parents[3] / "conf" / "tracker"

pytestmark = [pytest.mark.usefixtures("no_account"), LEAVES_FOLDERS]


@pytest.fixture(name="closed_port")
def _closed_port() -> Iterator[int]:
    with closed_port() as port:
        yield port


def _execute(tracker: Tracker, run_dir: Path, run_id: str = "run-1", planned: int = 3) -> None:
    tracker.start(run_info(run_dir, run_id=run_id))
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.finish(RunSummary(planned, RESULTS, wall_sec=4.0))


def _offline_sessions(run_dir: Path) -> int:
    return len([*(run_dir / "wandb").glob("offline-run-*")])


def _files_below(path: Path) -> set[Path]:
    return {file for file in path.rglob("*") if file.is_file()}


def test_everything_stays_in_the_run_directory_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ares_exp", f"policy.api_key={SECRET}"])
    run_dir = tmp_path / "run"
    write_results(run_dir)
    before = dict(os.environ)
    _execute(patient_tracker(), run_dir)

    outside = {file for file in _files_below(tmp_path) if not file.is_relative_to(run_dir)}
    assert outside == set()
    assert {file.relative_to(run_dir).parts[0] for file in _files_below(run_dir)} == {
        "episodes.jsonl",
        "trajectories",
        "wandb",
    }
    assert [file for file in _files_below(run_dir) if SECRET.encode() in file.read_bytes()] == []
    assert dict(os.environ) == before


def test_nothing_is_printed_and_no_signal_is_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: list[str]
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH, signal.SIGCHLD)
    before = [*map(signal.getsignal, numbers), sys.stdout, sys.stderr]
    _execute(patient_tracker(), tmp_path / "run")
    assert [*map(signal.getsignal, numbers), sys.stdout, sys.stderr] == before
    assert capfd.readouterr() == ("", "")
    assert log == []


def test_two_live_runs_in_one_process_do_not_end_each_other(service: WandbService, tmp_path: Path) -> None:
    first, second = patient_tracker(), patient_tracker()
    for name, tracker in (("a", first), ("b", second)):
        write_results(tmp_path / name)
        tracker.start(run_info(tmp_path / name, run_id=name))
        tracker.log_episode(RESULTS[0])
    first.finish(RunSummary(1, RESULTS[:1]))
    second.log_episode(RESULTS[1])
    second.finish(RunSummary(2, RESULTS[:2]))
    assert (first.failures, second.failures) == (0, 0)
    assert [len(ServedRun(service, name).rows) for name in ("a", "b")] == [1, 2]
    assert {file.relative_to(tmp_path).parts[0] for file in _files_below(tmp_path)} == {"a", "b"}
    assert "WANDB_DATA_DIR" not in os.environ


def test_nothing_of_wandb_stays_behind_after_finish(tmp_path: Path) -> None:
    _execute(patient_tracker(), tmp_path / "run")
    assert list(Path(tempfile.gettempdir()).glob(f"wandb-{os.getpid()}-*")) == []
    # The system monitor, which leaves a socket in the temporary directory after a short run, was never started.
    assert [file for file in _files_below(tmp_path) if "symon" in file.name] == []
    assert "WANDB_SERVICE" not in os.environ
    commands = [words for _, parent, _, words in processes() if parent == os.getpid()]
    assert [words for words in commands if "wandb-core" in words] == []


@pytest.mark.nightly
def test_a_tracker_can_be_used_for_a_second_run(service: WandbService, tmp_path: Path) -> None:
    tracker = patient_tracker()
    _execute(tracker, tmp_path / "a", run_id="a")
    _execute(tracker, tmp_path / "b", run_id="b")
    assert tracker.failures == 0
    assert [len(ServedRun(service, name).rows) for name in ("a", "b")] == [3, 3]


def test_a_complete_run_exits_with_zero(service: WandbService, tmp_path: Path) -> None:
    tracker = patient_tracker(log_artifacts=False)
    tracker.start(run_info(tmp_path / "run"))
    tracker.finish(RunSummary(1, (RESULTS[0],)))
    assert ServedRun(service).exit_codes == [0]
    assert service.artifacts == []


def test_a_run_id_that_wandb_refuses_is_made_plain(service: WandbService, tmp_path: Path) -> None:
    tracker = patient_tracker()
    _execute(tracker, tmp_path / "run", run_id="a/b:c d")
    assert tracker.failures == 0
    assert list(service.runs) == ["a-b-c-d"]


def test_start_and_log_return_at_once_and_the_loop_goes_on(tmp_path: Path) -> None:
    async def execute() -> tuple[float, float, int]:
        tracker = patient_tracker()
        started = time.perf_counter()
        tracker.start(run_info(tmp_path / "run"))
        tracker.log_episode(RESULTS[0])
        latency = time.perf_counter() - started
        finishing = asyncio.create_task(asyncio.to_thread(tracker.finish, RunSummary(1, RESULTS[:1])))
        turns = 0
        while not finishing.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert tracker.failures == 0
        return latency, time.perf_counter() - started, turns

    latency, whole, turns = asyncio.run(execute())
    assert latency < whole / 4
    assert turns > 1


def test_an_unreachable_service_is_one_warning_and_an_offline_run(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    tracker = WandbTracker(init_timeout_sec=1.0)
    started = time.perf_counter()
    tracker.start(run_info(tmp_path / "run"))
    assert time.perf_counter() - started < 1.0  # what waiting for the service would take
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.finish(RunSummary(3, RESULTS))

    assert tracker.failures == 1
    (message,) = log
    assert "recording offline" in message
    assert "ares-exp wandb sync" in message
    assert _offline_sessions(tmp_path / "run") == 1
    assert [file for file in _files_below(tmp_path) if SECRET.encode() in file.read_bytes()] == []


def test_online_without_a_key_asks_nothing_and_records_offline(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    tracker = patient_tracker(mode="online")
    _execute(tracker, tmp_path / "run")
    assert tracker.failures == 1
    assert "No API key" in log[0]
    assert _offline_sessions(tmp_path / "run") == 1


def test_a_run_directory_that_cannot_be_written_is_reported_not_raised(tmp_path: Path, log: list[str]) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "wandb").write_text("a file in the way")
    tracker = patient_tracker()
    _execute(tracker, run_dir)
    assert tracker.failures == 1
    assert "not tracked" in log[0]


def test_a_slow_finish_is_given_up(tmp_path: Path, log: list[str]) -> None:
    tracker = WandbTracker(finish_timeout_sec=0.001)
    _execute(tracker, tmp_path / "run")
    assert tracker.failures == len(log) == 2
    assert "table and artifacts did not finish" in log[0]
    assert log[1].startswith("W&B did not finish")
    for thread in threading.enumerate():
        if thread.name == "tracker":
            thread.join(60.0)


@pytest.mark.parametrize(
    ("mode", "environment", "expected_folder"),
    [
        ("disabled", {}, False),
        ("auto", {"WANDB_MODE": "disabled"}, False),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": SECRET}, True),
        ("offline", {"WANDB_API_KEY": SECRET}, True),
    ],
)
def test_modes(
    mode: str, environment: dict[str, str], expected_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracker = patient_tracker(mode=mode)
    _execute(tracker, tmp_path / "run")
    assert (tmp_path / "run" / "wandb").exists() is expected_folder
    assert tracker.failures == 0


def test_finish_without_start_does_nothing() -> None:
    tracker = patient_tracker()
    tracker.log_episode(RESULTS[0])
    tracker.finish(RunSummary(0, ()))
    assert tracker.failures == 0


@pytest.mark.parametrize("arguments", [{"mode": "sometimes"}, {"init_timeout_sec": 0}, {"project": ""}])
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(arguments))):
        WandbTracker(**arguments)  # type: ignore[arg-type]


def test_the_option_of_the_group_has_the_defaults_of_the_tracker() -> None:
    tracker = instantiate(yaml.safe_load((CONF / "wandb.yaml").read_text()))
    shown = [{name: value for name, value in vars(one).items() if name[0] != "_"} for one in (tracker, WandbTracker())]
    assert shown[0] == shown[1]


def test_samples_that_nobody_has_time_for_are_dropped_and_no_episode_is(tmp_path: Path, service: WandbService) -> None:
    service.mood = "silent"  # W&B waits for it, while everything else piles up
    tracker = patient_tracker(init_timeout_sec=60.0)
    tracker.start(run_info(tmp_path / "run"))
    for _ in range(2 * MAX_WAITING):
        tracker.log_system({"system/queue": 1})
    for result in RESULTS:
        tracker.log_episode(result)
    service.recover()
    tracker.finish(RunSummary(3, RESULTS))
    recorded = ServedRun(service)
    assert 0 < len([row for row in recorded.history if "system/queue" in row]) <= MAX_WAITING
    assert len(recorded.rows) == len(recorded.table) == len(RESULTS)


@pytest.mark.parametrize(
    ("netrc", "environment", "is_offline"),
    [
        (None, {}, True),
        ("machine {host}\n  login user\n  password {key}\n", {}, False),
        ("machine {host}\n  login user\n  password {key}\n", {"WANDB_MODE": "offline"}, True),
        ("machine github.com login user password {key}\n", {}, True),
        (None, {"WANDB_API_KEY": "0" * 40}, False),
    ],
)
def test_a_run_with_a_key_is_online(
    netrc: str | None, environment: dict[str, str], is_offline: bool, service: WandbService, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, log: list[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("WANDB_API_KEY")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / "home" / ".netrc").write_text(netrc.format(host=service.url.rpartition("/")[2], key="0" * 40))
        (tmp_path / "home" / ".netrc").chmod(0o600)
    _execute(patient_tracker(), tmp_path / "run")
    assert (_offline_sessions(tmp_path / "run"), log) == (int(is_offline), [])
