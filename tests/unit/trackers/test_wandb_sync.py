"""Offline runs are uploaded from wherever their run directory is: by the real `wandb sync`, to a loopback service."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ares_exp.run_summary import RunSummary
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.trackers.commands.command_line import main
from ares_exp.trackers.wandb_recording.record_file import next_step, read_records, record_files, write_records
from ares_exp.trackers.wandb_recording.relocation import relocate
from ares_exp.trackers.wandb_tracker import WandbTracker
from tests.unit.trackers.tracked_run import RESULTS, episode, run_info
from tests.unit.trackers.wandb_file import WandbFile
from tests.unit.trackers.wandb_service import WandbService
from tests.unit.trajectories.chats import chat


def play(run_dir: Path) -> None:
    """Two sessions of a run, offline."""
    (run_dir / "trajectories").mkdir(parents=True)
    (run_dir / "trajectories" / "e1.json").write_text('{"a": 1}')
    for earlier, new in (((), RESULTS), (RESULTS, (episode(4, 1.0),))):
        tracker = WandbTracker(mode="offline")
        tracker.start(
            run_info(run_dir, task_set=SAMPLES, tasks=("write-greeting",), resumed=bool(earlier), earlier=earlier)
        )
        for result in new:
            tracker.log_episode(result, chat(result.episode_id))
        tracker.finish(RunSummary(4, (*earlier, *new)))
        assert tracker.failures == 0


def local_paths(run_dir: Path, session: int) -> list[Path]:
    artifacts = WandbFile(run_dir, session).by_kind["artifact"]
    return [Path(entry.local_path) for artifact in artifacts for entry in artifact.manifest.contents]


def test_a_moved_run_directory_is_uploaded_whole_and_its_sessions_are_one_run(
    service: WandbService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    play(tmp_path / "here")
    assert all(path.is_relative_to(tmp_path / "here") for path in local_paths(tmp_path / "here", 0))
    there = tmp_path / "elsewhere" / "there"
    there.parent.mkdir()
    shutil.move(tmp_path / "here", there)

    assert main(["sync", str(there)]) == 0
    assert "was moved" in capfd.readouterr().out
    assert service.unknown == []
    assert {artifact.state for artifact in service.artifacts} == {"COMMITTED"}
    (trajectories,) = [one for one in service.artifacts if one.type == "trajectories"]
    assert trajectories.files["trajectories/e1.json"] == b'{"a": 1}'
    (task_set,) = [one for one in service.artifacts if one.type == "task-set"]
    assert (task_set.run, set(task_set.used_by)) == ("run-1", {"run-1"})
    history = service.history("run-1")
    assert [row["progress/finished"] for row in history if "progress/finished" in row] == [1, 2, 3, 4]
    assert [row["_step"] for row in history] == sorted({row["_step"] for row in history})
    assert service.summary("run-1")["run/tries"] == 4

    assert not Path("wandb").exists(), "W&B logs in the working directory"
    requests = len(service.asked)
    assert main(["sync", str(there.parent)]) == 0
    assert "Nothing to upload" in capfd.readouterr().out
    assert len(service.asked) == requests


@pytest.mark.usefixtures("no_account")
def test_what_is_missing_is_told_and_what_is_in_place_is_left_alone(tmp_path: Path) -> None:
    play(tmp_path / "run")
    session = record_files(tmp_path / "run")[0]
    before = session.read_bytes()
    assert relocate(session, tmp_path / "run").moved == 0
    assert session.read_bytes() == before
    (tmp_path / "run" / "trajectories" / "e1.json").write_text("another content")
    assert relocate(session, tmp_path / "run").missing == {
        "run-run-1-trajectories": [str(tmp_path / "run" / "trajectories" / "e1.json")]
    }


@pytest.mark.parametrize("as_request", [False, True])
def test_a_strangers_record_has_no_file_of_the_users_uploaded(
    as_request: bool, service: WandbService, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    play(tmp_path / "run")
    secret = tmp_path / "users" / "id_rsa"
    secret.parent.mkdir()
    secret.write_bytes(b"the user's own key: 5f2c19d07a")
    session = record_files(tmp_path / "run")[-1]
    records = list(read_records(session))
    place, record = next((n, one) for n, one in enumerate(records) if "trajectories" in one.artifact.name)
    entry = next(one for one in record.artifact.manifest.contents if one.path == "trajectories/e1.json")
    entry.local_path, entry.size = str(secret), secret.stat().st_size
    if as_request:
        logged = Record(num=record.num)
        logged.request.log_artifact.artifact.CopyFrom(record.artifact)
        records[place] = logged
    with session.open("wb") as file:
        write_records(file, records)

    for _ in range(2):
        assert main(["sync", str(tmp_path / "run"), "--again"]) == 1
        said = capfd.readouterr().err
        assert "1 files of the artifact run-run-1-trajectories are left out" in said
        assert f": {secret}; unless" in said
        assert not any(secret.read_bytes() in content for one in service.artifacts for content in one.files.values())


def test_a_file_elsewhere_that_is_what_was_recorded_is_uploaded(tmp_path: Path, no_account: None) -> None:
    """As the trajectories of the run that this one was branched from."""
    play(tmp_path / "run")
    parent = tmp_path / "parent.json"
    shutil.move(tmp_path / "run" / "trajectories" / "e1.json", parent)
    session = record_files(tmp_path / "run")[0]
    records = list(read_records(session))
    for record in records:
        for entry in record.artifact.manifest.contents:
            if entry.path == "trajectories/e1.json":
                entry.local_path = str(parent)
    with session.open("wb") as file:
        write_records(file, records)
    assert relocate(session, tmp_path / "run").missing == {}
    assert parent in local_paths(tmp_path / "run", 0)


def test_a_list_of_files_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    session = tmp_path / "wandb" / "offline-run-20260101_000000-x" / "run-x.wandb"
    session.parent.mkdir(parents=True)
    record = Record()
    record.artifact.manifest.manifest_file_path = "/elsewhere/manifest.json.gz"
    with session.open("wb") as file:
        write_records(file, [record])
    assert main(["sync", str(tmp_path)]) == 2
    assert "listed in another file" in capsys.readouterr().err


def test_a_service_that_is_gone_is_exit_code_1(
    service: WandbService, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path)
    service.mood = "refusing"
    assert main(["sync", str(tmp_path)]) == 1
    assert "not uploaded" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"nonsense", b":W&B\xe1\xbe\x00\1\0\0\0\3\0\1abc"])
def test_a_broken_file_is_told(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = tmp_path / "wandb" / "offline-run-20260101_000000-x" / "run-x.wandb"
    session.parent.mkdir(parents=True)
    session.write_bytes(content)
    assert main(["sync", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {session} ")


def test_a_place_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(tmp_path)]) == 2
    assert "tracker=wandb" in capsys.readouterr().err


def test_records_of_any_length_are_read_as_they_were_written(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    choice = random.Random(0)
    lengths = [0, 1, 32_750, 32_761, 32_768, 100_000, *(choice.randrange(40_000) for _ in range(50))]
    records = [Record(num=number, uuid="x" * length) for number, length in enumerate(lengths)]
    path = tmp_path / "run.wandb"
    with path.open("wb") as file:
        write_records(file, records)
    assert list(read_records(path)) == records
    whole = path.read_bytes()
    for end in (len(whole) - 1, len(whole) // 2, 8):
        path.write_bytes(whole[:end])
        torn = list(read_records(path))
        assert torn == records[: len(torn)]
        assert len(torn) < len(records)


def test_the_first_step_of_a_run_is_0(tmp_path: Path) -> None:
    assert next_step(tmp_path) == 0
