import json
import logging
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import (
    RunDir,
    RunLogHandler,
    append_lines,
    open_regular,
    read_json_object,
    read_record,
    read_yaml,
    refuse_used_run_dir,
    write_atomically,
)


def test_directory_is_claimed_once(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a" / "b")
    with run_dir.owned():
        assert run_dir.episodes.read_text() == ""
        with pytest.raises(ConfigError, match="is running"), RunDir(run_dir.path).owned(resume=True):
            pass
    with pytest.raises(ConfigError, match="contains another run"), RunDir(run_dir.path).owned():
        pass
    with RunDir(run_dir.path).owned(resume=True):
        assert run_dir.episodes.read_text() == ""


def test_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run directory"), RunDir(tmp_path / "file" / "run").owned():
        pass


@pytest.mark.parametrize("place", ["a" * 300, "a/" * 3000])
def test_too_long_path_is_refused(tmp_path: Path, place: str) -> None:
    refusal = refuse_used_run_dir([f"hydra.run.dir={tmp_path / place}"])
    assert refusal is not None
    assert refusal.endswith("Set another `hydra.run.dir=…`.")


def test_name_with_slashes_is_refused() -> None:
    refusal = refuse_used_run_dir(["name=../../evil"])  # before a folder of that name is made
    assert refusal == "Expected `name` to be a folder name without slashes, got '../../evil'."


def test_inaccessible_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        refusal = refuse_used_run_dir([f"hydra.run.dir={tmp_path / 'closed' / 'run'}"])
    finally:
        os.seteuid(user)
    assert refusal is not None
    assert "Permission denied. Set another" in refusal


def test_failed_write_preserves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", "new")
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "missing" / "x.json", "new")
    assert caught.value.filename == str(tmp_path / "missing" / "x.json"), "not the temporary file"
    assert path.read_text() == "old"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["folder", "x.json"]


def test_lone_surrogate_round_trips(tmp_path: Path) -> None:
    text = "broken \ud83d emoji"
    append_lines(tmp_path / "x.jsonl", {"text": text})
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"text": text}
    write_atomically(tmp_path / "x.yaml", text)
    assert "emoji" in (tmp_path / "x.yaml").read_text()


def test_line_that_does_not_fit_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_lines(path, {"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        with pytest.raises(OSError, match=r"No space|too large"):
            append_lines(path, {"text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    append_lines(path, {"n": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"n": 1}, {"n": 2}]


def test_values_of_sensitive_variables_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", 'pass"word-1234')
    append_lines(tmp_path / "x.jsonl", {"text": 'it is pass"word-1234.'})
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"text": "it is ***."}


def test_append_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "episodes.jsonl").symlink_to("mine")
    with pytest.raises(OSError, match="symbolic links"):
        append_lines(tmp_path / "episodes.jsonl", {"n": 1})
    with pytest.raises(ConfigError), RunDir(tmp_path).owned(resume=True):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["responses", "trajectories", "snapshots", "files", "branch_point", "tensorboard"])
def test_linked_subdirectory_is_refused(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to("../elsewhere")
    with (
        pytest.raises(ConfigError, match=f"contains links instead of folders: {name}"),
        RunDir(tmp_path / "run").owned(resume=resume),
    ):
        pass
    assert not (tmp_path / "run" / "episodes.jsonl").exists()


def test_run_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    with RunDir(tmp_path / "run").owned():
        assert (tmp_path / "elsewhere" / "episodes.jsonl").exists()


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular file"):
        open_regular(tmp_path / "pipe")


def test_discard_removes_only_files_of_the_refused_run(tmp_path: Path) -> None:
    refused = tmp_path / "runs" / "mine" / "now"
    (refused / ".hydra").mkdir(parents=True)
    (refused / ".hydra" / "config.yaml").write_text("")
    RunDir(refused).discard()
    assert not refused.exists()
    assert refused.parent.exists(), "somebody else's"
    (refused / ".hydra").mkdir(parents=True)
    (refused / "mine.txt").write_text("")
    RunDir(refused).discard()
    assert (refused / "mine.txt").exists()
    default, other = tmp_path / "outputs" / "default", tmp_path / "outputs" / "other"
    for folder in (default / "2026-01-31_12-00-00", other / "2026-01-31_12-00-00"):
        folder.mkdir(parents=True)
        RunDir(folder).discard()
    assert not (tmp_path / "outputs").exists(), "the default place is made by the run"
    (default / "first").mkdir(parents=True)
    (default / "second").mkdir()
    RunDir(default / "second").discard()
    assert [path.name for path in default.iterdir()] == ["first"]
    started = RunDir(tmp_path / "started")
    with started.owned():
        started.discard()
    assert started.episodes.exists()


def test_temporary_files_of_killed_process_are_removed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    left = [
        tmp_path / ".summary.json.7.tmp",
        run_dir.responses / ".a.jsonl.7.tmp",
        tmp_path / "trajectories" / ".a.7.tmp",
    ]
    of_others = [run_dir.files, run_dir.snapshots, tmp_path / "wandb"]
    kept = [tmp_path / "a.tmp", *(folder / ".theirs.tmp" for folder in of_others)]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    run_dir.sweep_up()
    assert [path for path in (*left, *kept) if path.exists()] == kept


def test_unwritable_log_causes_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as in a run
    (tmp_path / "run").mkdir()
    handler = RunLogHandler(tmp_path / "run" / "run.log", delay=True)
    shutil.rmtree(tmp_path / "run")
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("lost")
    (tmp_path / "run").mkdir()
    logger.warning("written")
    handler.close()
    assert (tmp_path / "run" / "run.log").read_text() == "written\n"


def test_log_does_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as in a run
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run.log").symlink_to("mine")
    handler = RunLogHandler(tmp_path / "run.log", delay=True)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("theirs")
    handler.close()
    assert (tmp_path / "mine").read_text() == "mine"


LAUGHS = "- &n0 [x, x]\n" + "".join(f"- &n{n + 1} [*n{n}, *n{n}]\n" for n in range(40))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b" " * 150_000 + b"{}", "at most 150,001 bytes", id="too long"),
        pytest.param(b"[]", "an object, got a list", id="list"),
        pytest.param(b"null", "an object, got a NoneType", id="null"),
        pytest.param(b"", "expected JSON", id="empty"),
        pytest.param(b'{"a"', "expected JSON", id="torn"),
        pytest.param(b"\xff", "expected JSON", id="no text"),
        pytest.param(b"[" * 100_000, "expected JSON", id="deep"),
        pytest.param(b"9" * 100_000, "expected JSON", id="endless number"),
    ],
)
def test_invalid_json_object_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "record").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"record is broken: .*{expected}") as caught:
        read_json_object(tmp_path / "record", max_bytes=150_001)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[", id="torn"),
        pytest.param("- !!python/object/apply:os.system ['exit 3']\n", id="object"),
        pytest.param("x" * (4 * 2**20 + 1), id="huge"),
        pytest.param(LAUGHS, id="laughs"),
        pytest.param("[" * 5000, id="deep"),
        pytest.param("\0", id="nul"),
    ],
)
def test_invalid_yaml_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").write_text(text)
    with pytest.raises(ConfigError, match="record is broken") as caught:
        read_yaml(tmp_path / "record")
    assert len(str(caught.value)) < 600


def test_yaml_error_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("a: 1\nb: [\nc: 2\n")
    with pytest.raises(ConfigError, match=r"^.*line 2, column 4.*$"):
        read_yaml(tmp_path / "record")


def test_missing_file_and_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_record, read_json_object, read_yaml):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")
        with pytest.raises(OSError, match="regular file"):
            read(tmp_path / "pipe")
