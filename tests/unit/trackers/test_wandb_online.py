"""The real W&B client, online, against a service on the loopback."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from ares_exp.commands.cli.main import run_word
from ares_exp.records.results import RunSummary
from ares_exp.tasks.task_set import SAMPLES
from tests.leaks import processes, wait_until
from tests.unit.trackers.tracked_run import RESULTS, SECRET, patient_tracker, run_info, write_results
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS, ServedRun, WandbService
from tests.unit.trajectories.chats import chat

main = partial(run_word, program="ares-exp")

SUMMARY = RunSummary(3, RESULTS, wall_sec=4.0)

pytestmark = LEAVES_FOLDERS


def test_online_run_arrives_complete(service: WandbService, tmp_path: Path) -> None:
    write_results(tmp_path)
    tracker = patient_tracker(project="a-project")
    tracker.start(run_info(tmp_path, group="a sweep", task_set=SAMPLES, tasks=("write-greeting",)))
    for result in RESULTS:
        tracker.log_episode(result, chat(result.episode_id, result.task_name))
    tracker.finish(SUMMARY)

    assert tracker.failures == 0
    assert tracker.place is not None
    assert tracker.place.startswith("W&B: http")
    assert tracker.place.endswith("/a-project/runs/run-1")
    assert service.unknown == []
    by_type = {artifact.type: artifact for artifact in service.artifacts}
    assert {artifact.state for artifact in service.artifacts} == {"COMMITTED"}
    assert by_type["task-set"].used_by == ["run-1"]
    assert "write-greeting/instruction.md" in by_type["task-set"].manifest
    assert by_type["trajectories"].used_by == []
    assert by_type["trajectories"].files["trajectories/e1.json"] == b"{}"
    assert ServedRun(service).first["groupName"] == "a sweep"
    assert len(ServedRun(service).table) == 3
    assert [content for content in service.everything if SECRET.encode() in content] == []

    requests = len(service.asked)
    assert main(["wandb", "sync", str(tmp_path)]) == 0
    assert len(service.asked) == requests, "the service has all of it"


def test_branch_uses_the_version_of_its_parent(service: WandbService, tmp_path: Path) -> None:
    parent, branch = tmp_path / "parent", tmp_path / "branch"
    write_results(parent)
    for info in (run_info(parent, run_id="parent"), run_info(branch, run_id="branch", parents=(parent,))):
        tracker = patient_tracker()
        tracker.start(info)
        tracker.finish(SUMMARY)
        assert tracker.failures == 0
    (artifact,) = [one for one in service.artifacts if one.type == "trajectories"]
    assert (artifact.run, artifact.used_by) == ("parent", ["branch"])
    assert ServedRun(service, "branch").config["inputs"] == [{"name": artifact.name, "digest": artifact.digest}]


# In a separate process: W&B's service process would continue the run until this process ends. All modules are imported
# before, so that the whole bound on the end is for W&B itself.
RUN_WORDS = """
import logging, sys
from pathlib import Path
import pandas, scipy.stats, wandb
from ares_exp.trackers.wandb_tracker import WandbTracker
from tests.unit.trackers.test_wandb_online import RESULTS, SUMMARY, run_info

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
tracker = WandbTracker(init_timeout_sec=100.0, finish_timeout_sec=10.0)
tracker.start(run_info(Path(sys.argv[1]), run_id=Path(sys.argv[1]).name))
tracker.log_episode(RESULTS[0])
sys.stdin.readline()
for result in RESULTS[1:]:
    tracker.log_episode(result)
    tracker.log_system({"system/queue": 2})
print("went on")
tracker.finish(SUMMARY)
print("counted:", tracker.failures > 0)
"""


@pytest.mark.once
@pytest.mark.timeout(600)
@pytest.mark.nightly  # the daily run has `test_without_the_service_a_run_is_recorded_offline`
def test_service_failure_gives_only_a_warning(no_account: None, tmp_path: Path) -> None:
    with ExitStack() as stack:  # all at the same time: each takes as long as a run waits for its end
        services = {fate: stack.enter_context(contextlib.closing(WandbService())) for fate in FATES}
        runs = {fate: stack.enter_context(running(service, tmp_path / fate)) for fate, service in services.items()}
        for fate, service in services.items():
            assert service.wait_for(lambda lines=service.lines: bool(lines), timeout=200)  # type: ignore[misc]
            FATES[fate](service)
        for process in runs.values():
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
        said = {fate: process.communicate(timeout=200)[0].splitlines() for fate, process in runs.items()}
        for fate, process in runs.items():
            assert process.returncode == 0
            warnings = [line for line in said[fate] if line.startswith("W&B")]
            assert [line for line in said[fate] if line not in warnings] == ["went on", "counted: True"]
            assert 1 <= len(warnings) <= 2, warnings  # of the numbers, and of the files
            assert any("on disk" in line for line in warnings), warnings
        # W&B's service processes, which are not waited for long, write what they still have when they end.
        pids = {str(process.pid) for process in runs.values()}
        assert wait_until(
            lambda: not [words for *_, words in processes() if "wandb-core" in words and pids & {*words.split()}]
        )
        for fate, service in services.items():
            if fate == "dies":
                service = stack.enter_context(contextlib.closing(WandbService()))
                service.start()
            service.recover()
            command = [sys.executable, "-m", "ares_exp", "wandb", "sync", str(tmp_path / fate)]
            done = subprocess.run(command, env=reaching(service), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            recorded = ServedRun(service, fate)
            assert [row["progress/finished"] for row in recorded.rows] == [1, 2, 3], fate
            assert recorded.summary["run/planned"] == 3


FATES: dict[str, Callable[[WandbService], None]] = {
    "dies": WandbService.close,
    "silent": lambda service: setattr(service, "mood", "silent"),
    "broken": lambda service: setattr(service, "mood", "broken"),
}


@contextmanager
def running(service: WandbService, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    service.start()
    command = [sys.executable, "-c", RUN_WORDS, str(run_dir), run_dir.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=reaching(service), stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def reaching(service: WandbService) -> dict[str, str]:
    return {**os.environ, "WANDB_BASE_URL": service.url, "WANDB_API_KEY": "0" * 40}
