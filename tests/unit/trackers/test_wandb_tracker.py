"""The W&B tracker against the real W&B: offline runs are read back from the file that they leave."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
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

from ares_exp.results import EpisodeResult, ErrorInfo, Outcome, RunSummary
from ares_exp.trackers.null_tracker import NullTracker
from ares_exp.trackers.tracker import RunInfo, Tracker
from ares_exp.trackers.wandb_tracker import WandbTracker
from tests.unit.trackers.wandb_file import WandbFile

SECRET = "0123456789abcdef0123456789abcdef01234567"
CONF = Path(__file__).parents[3] / "conf" / "tracker"


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the developer's account nor their home takes part."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A loopback port at which nobody listens (bound, so that nobody else takes it meanwhile)."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What reaches the root logger, as a run's log does (`caplog` would also tap loggers that do not propagate)."""
    root, handler = logging.getLogger(), _Messages()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler.seen
    root.removeHandler(handler)
    root.setLevel(level)


def _result(index: int, reward: float | None, outcome: Outcome = Outcome.COMPLETED) -> EpisodeResult:
    return EpisodeResult(
        episode_id=f"e{index}",
        task_name=f"task{index}",
        attempt=0,
        seed=0,
        outcome=outcome,
        reward=reward,
        error=ErrorInfo("AgentError", "boom") if reward is None else None,
        num_steps=index,
        prompt_tokens=100,
        generated_tokens=10,
        cost=0.25,
        started_at=10.0,
        finished_at=12.5,
    )


RESULTS = (_result(1, 1.0), _result(2, None, Outcome.AGENT_ERROR), _result(3, 0.5))


def _info(run_dir: Path, run_id: str = "run-1") -> RunInfo:
    return RunInfo(
        run_dir=run_dir,
        name="a name",
        run_id=run_id,
        config={"seed": 3, "policy": {"api_key": SECRET, "api_key_env": "OPENAI_API_KEY"}},
        provenance={"argv": ["ares_exp", "seed=3"]},
        group="a sweep",
        job_type="evaluation",
        tags=("one",),
    )


def _write_files(run_dir: Path) -> None:
    (run_dir / "trajectories").mkdir(parents=True)
    (run_dir / "episodes.jsonl").write_text("{}\n")
    (run_dir / "trajectories" / "e1.json").write_text("{}")


def _play(tracker: Tracker, run_dir: Path, run_id: str = "run-1", planned: int = 3) -> None:
    tracker.start(_info(run_dir, run_id))
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.finish(RunSummary(planned, RESULTS, wall_sec=4.0))


def _files_below(path: Path) -> set[Path]:
    return {file for file in path.rglob("*") if file.is_file()}


def test_an_offline_run_holds_config_rows_totals_and_artifact(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _write_files(run_dir)
    tracker = WandbTracker(project="a-project", tags=("two", "one"))
    _play(tracker, run_dir)

    recorded = WandbFile(run_dir)
    assert tracker.failures == 0
    assert (recorded.run.run_id, recorded.run.project) == ("run-1", "a-project")
    assert (recorded.run.run_group, recorded.run.job_type) == ("a sweep", "evaluation")
    assert (recorded.run.display_name, sorted(recorded.run.tags)) == ("a name", ["one", "two"])
    assert recorded.config["seed"] == 3
    assert recorded.config["policy"] == {"api_key": "***", "api_key_env": "OPENAI_API_KEY"}
    assert recorded.config["provenance"] == {"argv": ["ares_exp", "seed=3"]}

    first, second, third = recorded.rows
    assert first["episode/reward"] == 1.0
    assert first["episode/num_steps"] == 1
    assert first["episode/duration_sec"] == 2.5
    assert (first["episode/prompt_tokens"], first["episode/generated_tokens"], first["episode/cost"]) == (100, 10, 0.25)
    assert "episode/reward" not in second
    assert "progress/mean_reward" not in second
    assert (third["outcome/completed"], third["outcome/agent_error"]) == (2, 1)
    assert (third["progress/finished"], third["progress/mean_reward"]) == (3, 0.75)
    assert recorded.step_metrics["episode/*"] == "progress/finished"
    assert recorded.step_metrics["outcome/*"] == "progress/finished"

    assert recorded.summary["run/mean_reward"] == 0.75
    assert recorded.summary["run/outcomes/agent_error"] == 1
    assert (recorded.summary["run/planned"], recorded.summary["run/scored"]) == (3, 2)
    (artifact,) = recorded.by_kind["artifact"]
    assert (artifact.name, artifact.type) == ("episodes-run-1", "episodes")
    assert {entry.path for entry in artifact.manifest.contents} == {"episodes.jsonl", "trajectories/e1.json"}
    assert recorded.exit_codes == [1]


def test_everything_stays_in_the_run_directory_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ares_exp", f"policy.api_key={SECRET}"])
    run_dir = tmp_path / "run"
    _write_files(run_dir)
    before = dict(os.environ)
    _play(WandbTracker(), run_dir)

    outside = {file for file in _files_below(tmp_path) if not file.is_relative_to(run_dir)}
    assert outside == set()
    assert {file.relative_to(run_dir).parts[0] for file in _files_below(run_dir)} == {
        "episodes.jsonl",
        "trajectories",
        "wandb",
    }
    assert [file for file in _files_below(run_dir) if SECRET.encode() in file.read_bytes()] == []
    assert dict(os.environ) == before


def test_nothing_is_printed_and_no_hook_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: list[str]
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH, signal.SIGCHLD)
    before = [*map(signal.getsignal, numbers), sys.exit, sys.excepthook, sys.stdout, sys.stderr]
    _play(WandbTracker(), tmp_path / "run")
    assert [*map(signal.getsignal, numbers), sys.exit, sys.excepthook, sys.stdout, sys.stderr] == before
    assert capfd.readouterr() == ("", "")
    assert log == []


def test_several_runs_in_one_process_do_not_mix(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _play(WandbTracker(), tmp_path / name, run_id=name)
    for name in ("a", "b"):
        recorded = WandbFile(tmp_path / name)
        assert recorded.run.run_id == name
        assert [row["progress/finished"] for row in recorded.rows] == [1, 2, 3]


def test_two_live_runs_in_one_process_do_not_end_each_other(tmp_path: Path) -> None:
    first, second = WandbTracker(), WandbTracker()
    for name, tracker in (("a", first), ("b", second)):
        _write_files(tmp_path / name)
        tracker.start(_info(tmp_path / name, run_id=name))
        tracker.log_episode(RESULTS[0])
    first.finish(RunSummary(1, RESULTS[:1]))
    second.log_episode(RESULTS[1])
    second.finish(RunSummary(2, RESULTS[:2]))
    assert (first.failures, second.failures) == (0, 0)
    assert [len(WandbFile(tmp_path / name).rows) for name in ("a", "b")] == [1, 2]
    assert {file.relative_to(tmp_path).parts[0] for file in _files_below(tmp_path)} == {"a", "b"}
    assert "WANDB_DATA_DIR" not in os.environ


def test_nothing_of_wandb_stays_behind_after_finish(tmp_path: Path) -> None:
    _play(WandbTracker(), tmp_path / "run")
    assert list(Path(tempfile.gettempdir()).glob(f"wandb-{os.getpid()}-*")) == []
    # The system monitor, which leaves a socket in the temporary directory after a short run, was never started.
    assert [file for file in _files_below(tmp_path) if "symon" in file.name] == []
    assert "WANDB_SERVICE" not in os.environ
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_child(path.parent)]
    assert [command for command in commands if b"wandb-core" in command] == []


def _is_child(process: Path) -> bool:
    try:
        return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid()
    except OSError:
        return False


def test_a_tracker_can_be_used_for_a_second_run(tmp_path: Path) -> None:
    tracker = WandbTracker()
    _play(tracker, tmp_path / "a", run_id="a")
    _play(tracker, tmp_path / "b", run_id="b")
    assert tracker.failures == 0
    assert len(WandbFile(tmp_path / "b").rows) == 3


def test_a_complete_run_exits_with_zero(tmp_path: Path) -> None:
    tracker = WandbTracker(log_artifacts=False)
    tracker.start(_info(tmp_path / "run"))
    tracker.finish(RunSummary(1, (RESULTS[0],)))
    recorded = WandbFile(tmp_path / "run")
    assert recorded.exit_codes == [0]
    assert "artifact" not in recorded.by_kind


def test_a_run_id_that_wandb_refuses_is_made_plain(tmp_path: Path) -> None:
    tracker = WandbTracker()
    _play(tracker, tmp_path / "run", run_id="a/b:c d")
    assert tracker.failures == 0
    assert WandbFile(tmp_path / "run").run.run_id == "a-b-c-d"


def test_start_and_log_return_at_once_and_the_loop_goes_on(tmp_path: Path) -> None:
    async def play() -> tuple[float, int]:
        tracker = WandbTracker()
        began = time.perf_counter()
        tracker.start(_info(tmp_path / "run"))
        tracker.log_episode(RESULTS[0])
        latency = time.perf_counter() - began
        finishing = asyncio.create_task(asyncio.to_thread(tracker.finish, RunSummary(1, RESULTS[:1])))
        turns = 0
        while not finishing.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert tracker.failures == 0
        return latency, turns

    latency, turns = asyncio.run(play())
    assert latency < 0.4  # less than importing wandb alone takes
    assert turns > 1


def test_an_unreachable_service_is_one_warning_and_an_offline_run(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    tracker = WandbTracker(init_timeout_sec=1.0)
    began = time.perf_counter()
    tracker.start(_info(tmp_path / "run"))
    assert time.perf_counter() - began < 0.5  # half of what waiting for the service would take
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.finish(RunSummary(3, RESULTS))

    assert time.perf_counter() - began < 10.0
    assert tracker.failures == 1
    (message,) = log
    assert "recording offline" in message
    assert "wandb sync" in message
    assert len(WandbFile(tmp_path / "run").rows) == 3
    assert [file for file in _files_below(tmp_path) if SECRET.encode() in file.read_bytes()] == []


def test_online_without_a_key_asks_nothing_and_records_offline(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    tracker = WandbTracker(mode="online")
    _play(tracker, tmp_path / "run")
    assert tracker.failures == 1
    assert "No API key" in log[0]
    assert len(WandbFile(tmp_path / "run").rows) == 3


def test_a_run_directory_that_cannot_be_written_is_reported_not_raised(tmp_path: Path, log: list[str]) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "wandb").write_text("a file in the way")
    tracker = WandbTracker()
    _play(tracker, run_dir)
    assert tracker.failures == 1
    assert "not tracked" in log[0]


def test_a_slow_finish_is_given_up(tmp_path: Path, log: list[str]) -> None:
    tracker = WandbTracker(finish_timeout_sec=0.001)
    _play(tracker, tmp_path / "run")
    assert tracker.failures == 1
    assert "did not finish within 0.001 s" in log[0]
    for thread in threading.enumerate():
        if thread.name == "tracker":
            thread.join(30.0)


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
    tracker = WandbTracker(mode=mode)  # type: ignore[arg-type]
    _play(tracker, tmp_path / "run")
    assert (tmp_path / "run" / "wandb").exists() is expected_folder
    assert tracker.failures == 0


def test_finish_without_start_does_nothing() -> None:
    tracker = WandbTracker()
    tracker.log_episode(RESULTS[0])
    tracker.finish(RunSummary(0, ()))
    assert tracker.failures == 0


@pytest.mark.parametrize("arguments", [{"mode": "sometimes"}, {"init_timeout_sec": 0}, {"project": ""}])
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError, match=next(iter(arguments))):
        WandbTracker(**arguments)  # type: ignore[arg-type]


def test_the_options_of_the_group_build_their_trackers(tmp_path: Path) -> None:
    trackers = {path.stem: instantiate(yaml.safe_load(path.read_text())) for path in CONF.glob("*.yaml")}
    assert (type(trackers["none"]), type(trackers["wandb"])) == (NullTracker, WandbTracker)
    assert vars(trackers["wandb"]).keys() == vars(WandbTracker()).keys()
    unequal = {k for k, v in vars(WandbTracker()).items() if v != vars(trackers["wandb"])[k]}
    assert unequal == {"_inbox"}, "the YAML and the constructor disagree on a default"


def test_the_null_tracker_leaves_nothing(tmp_path: Path) -> None:
    tracker = NullTracker()
    _play(tracker, tmp_path / "run")
    assert tracker.failures == 0
    assert not (tmp_path / "run").exists()
