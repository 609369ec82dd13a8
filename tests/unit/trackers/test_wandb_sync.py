"""Offline runs are uploaded from wherever their run directory is: by the real `wandb sync`, to a loopback service."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ares_exp.commands.cli.main import run_word
from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.run_dir import append_lines
from ares_exp.tasks.task_set import SAMPLES
from tests.leaks import wait_until
from tests.unit.commands.recorded import data_in, run_of
from tests.unit.trackers.tracked_run import RESULTS, episode, patient_tracker, run_info
from tests.unit.trackers.wandb_service import LEAVES_FOLDERS, ServedRun, WandbService, wandb_sync
from tests.unit.trajectories.chats import chat

main = partial(run_word, program="ares-exp")

pytestmark = LEAVES_FOLDERS


def execute(run_dir: Path, run_id: str = "run-1", **more: object) -> None:
    """Two sessions of a run, offline."""
    (run_dir / "trajectories").mkdir(parents=True)
    (run_dir / "trajectories" / "e1.json").write_text('{"a": 1}')
    for earlier, new in (((), RESULTS), (RESULTS, (episode(4, 1.0),))):
        execute_session(run_dir, earlier, new, run_id=run_id, **more)


def execute_session(
    run_dir: Path, earlier: Sequence[EpisodeResult], new: Sequence[EpisodeResult], **more: object
) -> None:
    tracker = patient_tracker(mode="offline")
    tasks = {"task_set": SAMPLES, "tasks": ("write-greeting",)}
    tracker.start(run_info(run_dir, resumed=bool(earlier), earlier=tuple(earlier), **tasks, **more))
    for result in new:
        tracker.log_episode(result, chat(result.episode_id, result.task_name))
        with (run_dir / "episodes.jsonl").open("a") as rows:
            rows.write(json.dumps(result.to_dict()) + "\n")
    tracker.finish(RunSummary(4, (*earlier, *new)))
    assert tracker.failures == 0


def test_plain_wandb_sync_uploads_all_but_the_links(service: WandbService, tmp_path: Path) -> None:
    run_of(tmp_path, RESULTS)
    store = tmp_path / "snapshots" / "objects"
    store.mkdir(parents=True)
    (store / "ab").write_text("content")
    tracker = patient_tracker(mode="offline", log_code=True)
    tracker.start(run_info(tmp_path, task_set=SAMPLES, tasks=("write-greeting",)))
    for result in RESULTS:
        tracker.log_episode(result, chat(result.episode_id, result.task_name))
    tracker.finish(RunSummary(3, tuple(replace(one, snapshots=1) for one in RESULTS), snapshot_dir=store.parent))
    assert tracker.failures == 0
    assert service.asked == []

    wandb_sync(tmp_path)
    assert service.unknown == []
    recorded = ServedRun(service)
    assert {artifact.state for artifact in service.artifacts} == {"COMMITTED"}
    assert [row["progress/finished"] for row in recorded.rows] == [1, 2, 3]
    assert recorded.summary["run/tries"] == 3
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3"]
    assert "Please do task2." in recorded.page(recorded.table[1]["trajectory"])
    files = {
        kind: set(recorded.artifacts(kind)[-1].manifest) for kind in ("trajectories", "snapshots", "report", "code")
    }
    assert files["trajectories"] >= {"episodes.jsonl", "trajectories/e1.json", "trajectories/e3.json"}
    assert (files["snapshots"], files["report"]) == ({"store.json", "objects/ab"}, {"report.html"})
    assert {"rollout.py", "trackers/tracker.py"} <= files["code"]
    payload, episodes = data_in(recorded.artifacts("report")[-1].files["report.html"].decode())
    assert (payload["runs"][0]["results"]["totals"]["tries"], len(episodes)) == (3, 3)
    assert recorded.summary["report"]["_type"] == "html-file"
    (inputs,) = recorded.config["inputs"]
    assert recorded.artifacts("task-set") == []

    assert main(["wandb", "sync", str(tmp_path)]) == 0
    (task_set,) = recorded.artifacts("task-set")
    assert task_set.used_by == ["run-1"]
    assert inputs == {"name": task_set.name, "digest": task_set.digest}

    scores = [{"config": {}}, {"episode_id": "e1", "rewards": {"judge": 0.5}}]
    append_lines(tmp_path / "scores" / "judge.jsonl", *scores)
    assert main(["wandb", "sync", str(tmp_path)]) == 0
    assert [(row["reward"], json.loads(row["rewards"])) for row in recorded.table[:1]] == [(1.0, {"judge": 0.5})]
    assert recorded.summary["stat/rewards/judge"] == 0.5
    assert "scores/judge.jsonl" in recorded.artifacts("trajectories")[-1].manifest
    requests = len(service.asked)
    assert main(["wandb", "sync", str(tmp_path)]) == 0
    assert len(service.asked) == requests, "nothing new"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.trackers.tracked_run import RESULTS, patient_tracker, run_info
from tests.unit.trajectories.chats import chat

run_dir = Path(sys.argv[1])
(run_dir / "trajectories").mkdir(parents=True)
tracker = patient_tracker(mode="offline")
tracker.start(run_info(run_dir))
for result in RESULTS:
    (run_dir / "trajectories" / f"{result.episode_id}.json").write_text(result.episode_id)
    tracker.log_episode(result, chat(result.episode_id, result.task_name))
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_offline_run_keeps_all_finished_episodes(service: WandbService, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(run_dir)], stdin=subprocess.PIPE) as process:
        assert wait_until(lambda: is_on_disk(run_dir), 200)
        process.communicate(b"now\n")
    wandb_sync(run_dir)
    recorded = ServedRun(service)
    assert [row["progress/finished"] for row in recorded.rows] == [1, 2, 3]
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3"]
    assert "Please do task3." in recorded.page(recorded.table[2]["trajectory"])
    assert {f"trajectories/e{n}.json" for n in (1, 2, 3)} <= set(recorded.artifacts("trajectories")[-1].manifest)

    # With many episodes, the kill may come before the last rows of the table: they are in the run directory.
    rows = [json.dumps(result.to_dict()) for result in (*RESULTS, episode(4, 1.0))]
    (run_dir / "episodes.jsonl").write_text("\n".join(rows) + "\n")
    assert main(["wandb", "sync", str(run_dir)]) == 0
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3", "e4"]
    assert "episodes.jsonl" in recorded.artifacts("trajectories")[-1].manifest


def is_on_disk(run_dir: Path) -> bool:
    """Whether W&B's file has three rows and the last artifact."""
    (*_, written) = (b"", *(path.read_bytes() for path in run_dir.glob("wandb/offline-run-*/*.wandb")))
    return written.count(b"episode/num_steps") >= 3 and b"trajectories/e3.json" in written


def test_moved_run_is_uploaded_as_one_run(
    service: WandbService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also a session that is recorded after the upload of the earlier ones."""
    monkeypatch.chdir(tmp_path)
    execute(tmp_path / "here")
    assert service.asked == []
    there = tmp_path / "elsewhere" / "there"
    there.parent.mkdir()
    shutil.move(tmp_path / "here", there)

    assert main(["wandb", "sync", str(there)]) == 0
    assert service.unknown == []
    assert list(service.runs) == ["run-1"]
    recorded = ServedRun(service)
    trajectories = recorded.artifacts("trajectories")[-1]
    assert trajectories.state == "COMMITTED"
    assert trajectories.files["trajectories/e1.json"] == b'{"a": 1}'
    (task_set,) = recorded.artifacts("task-set")
    assert task_set.used_by == ["run-1"]
    assert "write-greeting/instruction.md" in task_set.manifest
    assert [row["progress/finished"] for row in recorded.rows] == [1, 2, 3, 4]
    assert "Please do task2." in recorded.page(recorded.table[1]["trajectory"])
    assert recorded.exit_codes[-1] == 1, "an attempt has no reward"
    assert not Path("wandb").exists(), "W&B logs in the working directory"
    said = capfd.readouterr()
    assert "run-1" in said.out
    assert "ares_exp-wandb-" not in said.out + said.err, "names a folder that is removed"

    execute_session(there, (*RESULTS, episode(4, 1.0)), (episode(5, 1.0),))
    assert main(["wandb", "sync", str(there)]) == 0
    assert [row["progress/finished"] for row in recorded.rows] == [1, 2, 3, 4, 5]
    steps = [row["_step"] for row in recorded.history]
    assert steps == sorted(set(steps))
    assert [row["episode_id"] for row in recorded.table] == ["e1", "e2", "e3", "e4", "e5"]
    assert recorded.summary["run/tries"] == 5
    requests = len(service.asked)
    capfd.readouterr()
    assert main(["wandb", "sync", str(there.parent)]) == 0
    assert "already uploaded" in capfd.readouterr().out
    assert len(service.asked) == requests


@pytest.mark.nightly  # `test_branch_uses_the_version_of_its_parent` covers a running service
def test_branch_uses_unchanged_trajectories_of_its_parent(
    service: WandbService, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run directory may come from a stranger, who knows the digest only of files that they have."""
    parent = tmp_path / "parent"
    execute(parent, "parent")
    for name in ("branch", "other"):
        execute(tmp_path / name, name, parents=(parent,))
    assert main(["wandb", "sync", str(parent), str(tmp_path / "branch")]) == 0
    *_, used = [one for one in service.artifacts if (one.type, one.run) == ("trajectories", "parent")]
    assert used.used_by == ["branch"]
    (parent / "trajectories" / "e1.json").write_text("something else")
    capfd.readouterr()
    assert main(["wandb", "sync", str(tmp_path / "other")]) == 1
    assert f"the trajectories of its parent {parent} are missing or changed" in capfd.readouterr().err
    assert not [one for one in service.everything if b"something else" in one]
    assert used.used_by == ["branch"]


@pytest.mark.nightly
def test_links_in_a_moved_run_are_not_followed(service: WandbService, tmp_path: Path) -> None:
    execute(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "run")
    key = tmp_path / "id_rsa"
    key.write_text("the user's own key: 5f2c19d07a")
    page = next((tmp_path / "run" / "wandb" / "pages").iterdir())
    for place in (page, tmp_path / "run" / "trajectories" / "e1.json", tmp_path / "run" / "wandb/task-set/tasks.json"):
        place.unlink()
        place.symlink_to(key)
    assert main(["wandb", "sync", str(tmp_path / "run")]) == 0
    assert not [one for one in service.everything if b"5f2c19d07a" in one]


def test_unavailable_service_exits_with_1(
    service: WandbService, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    execute(tmp_path)
    service.mood = "refusing"
    assert main(["wandb", "sync", str(tmp_path)]) == 1
    assert "not uploaded" in capfd.readouterr().err


BROKEN_RECORDS = ("", "[]", '{"id": "../x", "project": "p"}', '{"id": 3}', "{" * 100_000)


@pytest.mark.parametrize(
    ("content", "records"),
    [(b"", [None]), pytest.param(b"nonsense", [None], marks=pytest.mark.nightly), (None, BROKEN_RECORDS)],
    ids=["an empty session", "a broken session", "a broken record"],
)
def test_broken_run_is_named(
    content: bytes | None, records: Sequence[str | None], service: WandbService, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    session = tmp_path / "wandb" / "offline-run-20260101_000000-x" / "run-x.wandb"
    session.parent.mkdir(parents=True)
    session.write_bytes(content or b"")
    for record in records:
        if record is not None:
            (tmp_path / "wandb" / "run.json").write_text(record)
        assert main(["wandb", "sync", str(tmp_path)]) == (1 if record is None else 2)
        expected = f"not uploaded: {session}" if record is None else str(tmp_path / "wandb" / "run.json")
        assert expected in capfd.readouterr().err


def test_folder_without_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb", "sync", str(tmp_path)]) == 2
    assert "tracker=wandb" in capsys.readouterr().err
