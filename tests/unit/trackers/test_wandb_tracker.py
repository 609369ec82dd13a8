"""The W&B tracker against the real W&B, as a part of a process that has other things to do."""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pydantic
import pytest

from ares_exp.records.results import RunSummary
from ares_exp.trackers.tracker import Tracker
from ares_exp.trackers.wandb_tracker import MAX_WAITING, WandbTracker
from tests.leaks import processes
from tests.unit.trackers.tracked_run import RESULTS, SECRET, patient_tracker, run_info, write_results
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS, ServedRun, WandbService, wandb_sync

CONF = Path(__file__).parents[3] / "conf" / "tracker"

pytestmark = [pytest.mark.usefixtures("no_account"), LEAVES_FOLDERS]


def _execute(tracker: Tracker, run_dir: Path, run_id: str = "run-1", planned: int = 3) -> None:
    tracker.start(run_info(run_dir, run_id=run_id))
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.finish(RunSummary(planned, RESULTS, wall_sec=4.0))


def _offline_sessions(run_dir: Path) -> int:
    return len([*(run_dir / "wandb").glob("offline-run-*")])


def _files_below(path: Path) -> set[Path]:
    return {file for file in path.rglob("*") if file.is_file()}


def test_offline_run_writes_only_to_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], log: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ares_exp", f"policy.api_key={SECRET}"])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH, signal.SIGCHLD)
    before = [dict(os.environ), *map(signal.getsignal, numbers), sys.stdout, sys.stderr]
    _execute(patient_tracker(), tmp_path / "run")

    assert [dict(os.environ), *map(signal.getsignal, numbers), sys.stdout, sys.stderr] == before
    assert (capfd.readouterr(), log) == (("", ""), [])
    files = _files_below(tmp_path)
    assert {file.relative_to(tmp_path).parts[:2] for file in files} == {("run", "wandb")}
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    # The system monitor, which leaves a socket in the temporary directory after a short run, was never started.
    assert [file for file in files if "symon" in file.name] == []
    assert list(Path(tempfile.gettempdir()).glob(f"wandb-{os.getpid()}-*")) == []
    commands = [words for _, parent, _, words in processes() if parent == os.getpid()]
    assert [words for words in commands if "wandb-core" in words] == []


def test_two_runs_in_one_process_do_not_interfere(service: WandbService, tmp_path: Path) -> None:
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


def test_complete_run_exits_with_zero(service: WandbService, tmp_path: Path) -> None:
    tracker = patient_tracker(log_artifacts=False)
    tracker.start(run_info(tmp_path / "run", run_id="a/b:c d"))
    tracker.finish(RunSummary(1, (RESULTS[0],)))
    assert (tracker.failures, list(service.runs)) == (0, ["a-b-c-d"])
    assert ServedRun(service, "a-b-c-d").exit_codes == [0]
    assert service.artifacts == []


@pytest.mark.parametrize(
    ("mood", "key", "cause"),
    [("closed", SECRET, "CommError"), ("broken", SECRET, "CommError"), ("well", None, "No API key")],
)
def test_without_the_service_a_run_is_recorded_offline(
    mood: str, key: str | None, cause: str, service: WandbService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    log: list[str],
) -> None:  # fmt: skip
    if mood == "closed":
        service.close()
    service.mood = mood
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY")
    run_dir = tmp_path / "run"
    tracker = WandbTracker(mode="online", init_timeout_sec=1.0)
    _execute(tracker, run_dir)
    (message,) = log
    assert "so the run is recorded in" in message
    assert f"`ares-exp wandb sync {run_dir}`" in message
    assert cause in message
    assert (tracker.failures, _offline_sessions(run_dir)) == (1, 1)
    assert tracker.place == f"W&B (offline). To upload the run: ares-exp wandb sync {run_dir}"
    assert [file for file in _files_below(tmp_path) if SECRET.encode() in file.read_bytes()] == []
    if mood == "broken":
        service.mood = "well"
        wandb_sync(run_dir)
        assert len(ServedRun(service).rows) == 3


def test_slow_finish_is_abandoned(tmp_path: Path, log: list[str]) -> None:
    tracker = WandbTracker(finish_timeout_sec=0.001)
    _execute(tracker, tmp_path / "run")
    assert tracker.failures == len(log) == 2
    assert "table and artifacts did not finish" in log[0]
    assert log[1].startswith("W&B did not finish")
    for thread in threading.enumerate():
        if thread.name == "tracker":
            thread.join(60.0)


@pytest.mark.parametrize("arguments", [{"mode": "sometimes"}, {"init_timeout_sec": 0}, {"project": ""}])
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(arguments))):
        WandbTracker(**arguments)  # type: ignore[arg-type]


def test_excess_samples_are_dropped_and_episodes_kept(tmp_path: Path, service: WandbService) -> None:
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


LOGIN = "machine {host}\n  login user\n  password {key}\n"
KEY = {"WANDB_API_KEY": "0" * 40}


@pytest.mark.parametrize(
    ("mode", "netrc", "environment", "recorded"),
    [
        ("auto", None, {}, "offline-run"),
        ("auto", None, KEY, "run"),
        ("auto", LOGIN, {}, "run"),
        ("auto", LOGIN.replace("{host}", "github.com"), {}, "offline-run"),
        ("auto", LOGIN, {"WANDB_MODE": "offline"}, "offline-run"),
        ("auto", None, {"WANDB_MODE": "disabled", **KEY}, None),
        ("offline", None, KEY, "offline-run"),
        ("disabled", None, KEY, None),
    ],
)
def test_mode_follows_keys_and_settings(
    mode: str, netrc: str | None, environment: dict[str, str], recorded: str | None, service: WandbService,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("WANDB_API_KEY")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (tmp_path / "home" / ".netrc").write_text(netrc.format(host=service.url.rpartition("/")[2], key="0" * 40))
        (tmp_path / "home" / ".netrc").chmod(0o600)
    _execute(patient_tracker(mode=mode), tmp_path / "run")
    folders = [path.name.partition("-202")[0] for path in (tmp_path / "run").glob("wandb/*run-202*")]
    assert (folders, log) == ([recorded] if recorded else [], [])
    assert bool(service.asked) == (recorded == "run")
